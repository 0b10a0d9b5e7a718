/* NCCL between processes (and between devices of one), over shared memory: its collectives are items of a stream's queue,
 * as its kernels are, and move and add for real.
 *
 * A communicator is one file that all ranks map. A collective goes in rounds of at most CHUNK bytes a rank: each rank
 * posts its part, waits for all, and takes what it needs; two slots by turns. Sends and receives go through one ring a
 * pair. Checked, each an error with the call's name: host memory or another device's given to a call, collectives that
 * differ between ranks, two ranks on one device. */
#define _GNU_SOURCE
#include "fake.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CHUNK (256 << 10)
#define RING (64 << 10)
#define RANKS 64
enum { OK = 0, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECV } op_kind;
static const char *const CALLS[] = {"ncclAllReduce", "ncclReduce", "ncclBroadcast", "ncclAllGather", "ncclReduceScatter", "ncclAlltoAll", "ncclSend", "ncclRecv"};
static const char *const TYPES[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16", "float8_e4m3", "float8_e5m2"};
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
enum { SUM, PROD, MAX, MIN, AVG, DYNAMIC };

typedef struct { int kind, type, op, root; uint64_t count, number; } description;
typedef struct {
  _Atomic uint64_t posted, taken;
  _Atomic int joined, device, split_color, split_key, waits;
  _Atomic uint64_t splits;
  description said[2];
} seat;
typedef struct { _Atomic uint64_t in, out; char bytes[RING]; } ring;
typedef struct { _Atomic int ready; _Atomic uint64_t wanted; seat seats[RANKS]; } hall; /* then slots, then rings */

typedef struct comm {
  char name[96];
  hall *hall;
  size_t bytes;
  int rank, ranks, device;
  uint64_t submitted, next, round, splits;
  _Atomic int aborted;
  point last;
} comm;

typedef struct {
  item it;
  comm *on;
  op_kind kind;
  const char *send;
  char *recv;
  uint64_t count, number;
  int type, op, root, phase;
  double factor;
  size_t done;
  double since;
} collective;
typedef struct { op_kind kind; char *buffer; size_t bytes, moved; int peer; bool headed; } passing;
typedef struct { item it; comm *on; uint64_t number; int count; double since; passing all[]; } passings;

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static char *slot(comm *c, int rank, uint64_t round) { return (char *)(c->hall + 1) + ((size_t)rank * 2 + round % 2) * CHUNK; }
static ring *ring_of(comm *c, int from, int to) { return (ring *)((char *)(c->hall + 1) + (size_t)c->ranks * 2 * CHUNK) + (size_t)from * c->ranks + to; }

/* ---- arithmetic ---- */
static float from_bf16(uint16_t h) { uint32_t u = (uint32_t)h << 16; float f; memcpy(&f, &u, 4); return f; }
static uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* NaN */
  return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16); /* to nearest, ties to even */
}
#define COMBINE(T, A, LOAD, STORE)                                                          \
  for (uint64_t i = 0; i < n; i++) {                                                        \
    A sum = 0;                                                                              \
    for (int r = 0; r < ranks; r++) {                                                       \
      A x = (A)(LOAD(((const T *)parts[r])[i]));                                            \
      if (op == DYNAMIC) x = (A)(x * factor);                                               \
      if (r == 0) sum = x;                                                                  \
      else if (op == PROD) sum = sum * x;                                                   \
      else if (op == MAX) sum = x > sum || x != x ? x : sum;                                \
      else if (op == MIN) sum = x < sum || x != x ? x : sum;                                \
      else sum = sum + x;                                                                   \
    }                                                                                       \
    if (op == AVG) sum = (A)(sum / (A)ranks);                                               \
    ((T *)to)[i] = (T)(STORE(sum));                                                         \
  }
#define AS_IS(x) (x)
static void combine(void *to, const char **parts, int ranks, uint64_t n, int type, int op, double factor) {
  switch (type) {
  case 0: COMBINE(int8_t, int8_t, AS_IS, AS_IS) break;
  case 1: COMBINE(uint8_t, uint8_t, AS_IS, AS_IS) break;
  case 2: COMBINE(int32_t, int32_t, AS_IS, AS_IS) break;
  case 3: COMBINE(uint32_t, uint32_t, AS_IS, AS_IS) break;
  case 4: COMBINE(int64_t, int64_t, AS_IS, AS_IS) break;
  case 5: COMBINE(uint64_t, uint64_t, AS_IS, AS_IS) break;
  case 6: COMBINE(_Float16, float, AS_IS, AS_IS) break;
  case 7: COMBINE(float, float, AS_IS, AS_IS) break;
  case 8: COMBINE(double, double, AS_IS, AS_IS) break;
  case 9: COMBINE(uint16_t, float, from_bf16, to_bf16) break;
  default: fake_die("NCCL: %s cannot be added here", TYPES[type]);
  }
}

/* ---- one collective ---- */
static bool over(comm *c) { return atomic_load(&c->aborted); }
static void waits(comm *c, double *since, uint64_t number) { /* peers hear after 2 ms that they hold somebody up */
  if (*since == 0) *since = now();
  else if (now() - *since > 0.002) {
    atomic_store(&c->hall->seats[c->rank].waits, 1);
    uint64_t wanted = atomic_load(&c->hall->wanted);
    while (wanted < number + 1 && !atomic_compare_exchange_weak(&c->hall->wanted, &wanted, number + 1));
  }
}
static void goes_on(comm *c, double *since) { *since = 0, atomic_store(&c->hall->seats[c->rank].waits, 0); }

static void said(char *text, size_t room, const description *d) { snprintf(text, room, "%s of %lu %s (operation %d, root %d)", CALLS[d->kind], (unsigned long)d->count, TYPES[d->type], d->op, d->root); }
static void compare(comm *c, uint64_t round) {
  const description *own = &c->hall->seats[c->rank].said[round % 2];
  for (int r = 0; r < c->ranks; r++) {
    const description *d = &c->hall->seats[r].said[round % 2];
    if (d->kind != own->kind || d->type != own->type || d->op != own->op || d->root != own->root || d->count != own->count) {
      char a[120], b[120];
      said(a, sizeof a, own), said(b, sizeof b, d);
      fake_die("collectives differ between ranks: rank %d has %s, rank %d has %s", c->rank, a, r, b);
    }
  }
}

static bool collective_step(item *it) {
  collective *x = (collective *)it;
  comm *c = x->on;
  hall *h = c->hall;
  if (over(c)) { c->next++; return true; }
  if (c->next != x->number) return false; /* NCCL works one communicator's calls off in their order */
  size_t size = SIZES[x->type], whole = x->count * size, room = CHUNK;
  bool divided = x->kind == REDUCE_SCATTER || x->kind == ALL_TO_ALL;
  if (divided) room = (size_t)CHUNK / c->ranks & ~(size_t)15;
  for (;;) {
    size_t n = whole - x->done < room ? whole - x->done : room;
    uint64_t round = c->round;
    if (x->phase == 0) {
      for (int r = 0; r < c->ranks; r++)
        if (round >= 2 && atomic_load(&h->seats[r].taken) < round - 1) { waits(c, &x->since, x->number); return false; }
      goes_on(c, &x->since);
      h->seats[c->rank].said[round % 2] = (description){x->kind, x->type, x->op < DYNAMIC ? x->op : DYNAMIC, x->root, x->count, x->number};
      char *own = slot(c, c->rank, round);
      if (divided)
        for (int r = 0; r < c->ranks; r++) memcpy(own + r * room, x->send + r * whole + x->done, n);
      else if (n && (x->kind != BROADCAST || c->rank == x->root)) memcpy(own, x->send + x->done, n);
      atomic_store(&h->seats[c->rank].posted, round + 1);
      x->phase = 1;
    }
    for (int r = 0; r < c->ranks; r++)
      if (atomic_load(&h->seats[r].posted) < round + 1) { waits(c, &x->since, x->number); return false; }
    goes_on(c, &x->since);
    compare(c, round);
    const char *parts[RANKS];
    for (int r = 0; r < c->ranks; r++) parts[r] = slot(c, r, round) + (divided ? c->rank * room : 0);
    if (n) switch (x->kind) {
    case REDUCE: if (c->rank != x->root) break; /* fall through */
    case ALL_REDUCE: case REDUCE_SCATTER: combine(x->recv + x->done, parts, c->ranks, n / size, x->type, x->op < DYNAMIC ? x->op : DYNAMIC, x->factor); break;
    case BROADCAST: if (x->recv) memcpy(x->recv + x->done, parts[x->root], n); break;
    default: for (int r = 0; r < c->ranks; r++) memcpy(x->recv + r * whole + x->done, parts[r], n);
    }
    atomic_store(&h->seats[c->rank].taken, round + 1);
    c->round++, x->phase = 0, x->done += n;
    if (x->done >= whole) { c->next++; return true; }
  }
}
static bool collective_wanted(item *it) { collective *x = (collective *)it; return x->number < atomic_load(&x->on->hall->wanted); }

/* ---- sends and receives of one group ---- */
static bool pass(comm *c, passing *p) { /* true when it is done */
  bool sends = p->kind == SEND;
  ring *r = sends ? ring_of(c, c->rank, p->peer) : ring_of(c, p->peer, c->rank);
  uint64_t in = atomic_load(&r->in), out = atomic_load(&r->out);
  if (!p->headed) { /* each message begins with its length */
    if (sends ? RING - (in - out) < 8 : in - out < 8) return false;
    uint64_t length = p->bytes;
    for (int i = 0; i < 8; i++) {
      if (sends) r->bytes[(in + i) % RING] = ((char *)&length)[i]; else ((char *)&length)[i] = r->bytes[(out + i) % RING];
    }
    if (sends) atomic_store(&r->in, in += 8); else atomic_store(&r->out, out += 8);
    if (length != p->bytes) fake_die("collectives differ between ranks: rank %d has ncclRecv of %zu bytes, rank %d sends %lu", c->rank, p->bytes, p->peer, (unsigned long)length);
    p->headed = true;
  }
  size_t n = sends ? RING - (in - out) : in - out;
  if (n > p->bytes - p->moved) n = p->bytes - p->moved;
  uint64_t at = (sends ? in : out) % RING;
  size_t first = n < RING - at ? n : RING - at;
  if (sends) {
    memcpy(r->bytes + at, p->buffer + p->moved, first), memcpy(r->bytes, p->buffer + p->moved + first, n - first);
    atomic_store(&r->in, in + n);
  } else {
    memcpy(p->buffer + p->moved, r->bytes + at, first), memcpy(p->buffer + p->moved + first, r->bytes, n - first);
    atomic_store(&r->out, out + n);
  }
  p->moved += n;
  return p->moved == p->bytes;
}
static bool passings_step(item *it) {
  passings *g = (passings *)it;
  comm *c = g->on;
  if (over(c)) { c->next++; return true; }
  if (c->next != g->number) return false;
  bool all = true, moved = false;
  for (int i = 0; i < g->count; i++) {
    passing *p = &g->all[i];
    if (p->headed && p->moved == p->bytes) continue;
    bool blocked = false; /* one pair's messages keep their order */
    for (int j = 0; j < i; j++) blocked |= g->all[j].kind == p->kind && g->all[j].peer == p->peer && !(g->all[j].headed && g->all[j].moved == g->all[j].bytes);
    size_t before = p->moved;
    if (blocked || !pass(c, p)) all = false;
    moved |= p->moved != before;
  }
  if (all) { c->next++; goes_on(c, &g->since); return true; }
  if (moved) g->since = 0;
  if (g->since == 0) g->since = now();
  else if (now() - g->since > 0.002) atomic_store(&c->hall->seats[c->rank].waits, 1);
  return false;
}
static bool passings_wanted(item *it) {
  passings *g = (passings *)it;
  for (int i = 0; i < g->count; i++)
    if (atomic_load(&g->on->hall->seats[g->all[i].peer].waits)) return true;
  return false;
}

/* ---- groups, and putting calls into queues ---- */
typedef struct { comm *on; void *stream; collective c; passing p; bool passes; } call;
static __thread int depth, call_count, call_room;
static __thread call *calls;

static void submit_collective(call *k) {
  collective *x = malloc(sizeof *x);
  *x = k->c;
  x->it = (item){.step = collective_step, .wanted = collective_wanted, .name = CALLS[x->kind]};
  x->number = k->on->submitted++;
  k->on->last = fake_submit(k->stream, &x->it);
}
static void submit_passings(int from) { /* all of this communicator and stream from here on: they go together */
  call *k = &calls[from];
  int count = 0;
  for (int i = from; i < call_count; i++) count += calls[i].passes && calls[i].on == k->on && calls[i].stream == k->stream;
  passings *g = calloc(1, sizeof *g + count * sizeof(passing));
  g->it = (item){.step = passings_step, .wanted = passings_wanted, .name = "ncclSend/ncclRecv"};
  g->on = k->on, g->number = k->on->submitted++;
  comm *on = k->on;
  void *stream = k->stream;
  for (int i = from; i < call_count; i++)
    if (calls[i].passes && calls[i].on == on && calls[i].stream == stream) g->all[g->count++] = calls[i].p, calls[i].on = NULL;
  on->last = fake_submit(stream, &g->it);
}
int ncclGroupStart(void) { depth++; return OK; }
int ncclGroupEnd(void) {
  if (--depth) return OK;
  for (int i = 0; i < call_count; i++)
    if (calls[i].on) { if (calls[i].passes) submit_passings(i); else submit_collective(&calls[i]); }
  call_count = 0;
  return OK;
}
static int put(call k) {
  if (call_count == call_room) calls = realloc(calls, (call_room = call_room ? 2 * call_room : 16) * sizeof *calls);
  calls[call_count++] = k;
  ncclGroupStart();
  return ncclGroupEnd();
}

static void check(comm *c, const void *p, size_t bytes, const char *name, const char *side) {
  if (!bytes) return;
  region r = fake_region(p);
  if (r.kind != DEVICE) fake_die("%s: its %s buffer is %s, not memory of device %d", name, side, r.kind == PINNED ? "pinned host memory" : "host memory", c->device);
  if (r.device != c->device) fake_die("%s: its %s buffer lies on device %d; this communicator is of device %d", name, side, r.device, c->device);
  if ((uintptr_t)p + bytes > r.high) fake_die("%s: its %s buffer ends behind its memory", name, side);
}

typedef struct { double factor; int used; } dynamic_op;
static dynamic_op dynamic_ops[1024];
static int new_collective(op_kind kind, const void *send, void *recv, size_t count, int type, int op, int root, comm *c, void *stream) {
  size_t n = count * SIZES[type], all = n * c->ranks;
  if (kind != BROADCAST || c->rank == root) check(c, send, kind == REDUCE_SCATTER || kind == ALL_TO_ALL ? all : n, CALLS[kind], "send");
  if (kind != REDUCE || c->rank == root) check(c, recv, kind == ALL_GATHER || kind == ALL_TO_ALL ? all : n, CALLS[kind], "receive");
  stream = fake_stream(stream);
  if (fake_stream_device(stream) != c->device) fake_die("%s: a stream of device %d; this communicator is of device %d", CALLS[kind], fake_stream_device(stream), c->device);
  call k = {.on = c, .stream = stream};
  k.c = (collective){.on = c, .kind = kind, .send = send, .recv = recv, .count = count, .type = type, .op = op, .root = root};
  if (op >= DYNAMIC) k.c.factor = dynamic_ops[op - DYNAMIC].factor;
  return put(k);
}
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, comm *c, void *st) { return new_collective(ALL_REDUCE, s, r, n, t, op, 0, c, st); }
int ncclReduce(const void *s, void *r, size_t n, int t, int op, int root, comm *c, void *st) { return new_collective(REDUCE, s, r, n, t, op, root, c, st); }
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, comm *c, void *st) { return new_collective(BROADCAST, s, r, n, t, 0, root, c, st); }
int ncclBcast(void *b, size_t n, int t, int root, comm *c, void *st) { return ncclBroadcast(b, b, n, t, root, c, st); }
int ncclAllGather(const void *s, void *r, size_t n, int t, comm *c, void *st) { return new_collective(ALL_GATHER, s, r, n, t, 0, 0, c, st); }
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int op, comm *c, void *st) { return new_collective(REDUCE_SCATTER, s, r, n, t, op, 0, c, st); }
int ncclAlltoAll(const void *s, void *r, size_t n, int t, comm *c, void *st) { return new_collective(ALL_TO_ALL, s, r, n, t, 0, 0, c, st); }
static int new_passing(op_kind kind, void *b, size_t n, int t, int peer, comm *c, void *stream) {
  check(c, b, n * SIZES[t], CALLS[kind], kind == SEND ? "send" : "receive");
  if (peer < 0 || peer >= c->ranks) return INVALID_ARGUMENT;
  call k = {.on = c, .stream = fake_stream(stream), .passes = true};
  k.p = (passing){.kind = kind, .buffer = b, .bytes = n * SIZES[t], .peer = peer};
  return put(k);
}
int ncclSend(const void *b, size_t n, int t, int peer, comm *c, void *st) { return new_passing(SEND, (void *)b, n, t, peer, c, st); }
int ncclRecv(void *b, size_t n, int t, int peer, comm *c, void *st) { return new_passing(RECV, b, n, t, peer, c, st); }

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, comm *c) {
  (void)c;
  for (int i = 0; i < 1024; i++)
    if (!dynamic_ops[i].used) {
      double x = 0;
      (void)residence; /* a scalar on the device lies in host memory here */
      switch (type) {
      case 6: x = *(_Float16 *)scalar; break;
      case 7: x = *(float *)scalar; break;
      case 8: x = *(double *)scalar; break;
      case 9: x = from_bf16(*(uint16_t *)scalar); break;
      default: return INVALID_ARGUMENT;
      }
      dynamic_ops[i] = (dynamic_op){x, 1};
      *op = DYNAMIC + i;
      return OK;
    }
  return INVALID_USAGE;
}
int ncclRedOpDestroy(int op, comm *c) { (void)c; dynamic_ops[op - DYNAMIC].used = 0; return OK; }

/* ---- communicators ---- */
static const char *folder(void) { const char *f = getenv("FAKE_CUDA_SHM"); return f && *f ? f : "/dev/shm"; }
int ncclGetVersion(int *v) { *v = NCCL_BUILT; return OK; }
int ncclGetUniqueId(char *id) {
  static _Atomic int made;
  memset(id, 0, 128);
  snprintf(id, 64, "fake-nccl-%d-%ld-%d", getpid(), (long)(now() * 1e6), atomic_fetch_add(&made, 1));
  return OK;
}
typedef struct { char bytes[128]; } unique_id;
static comm *enter(const char *name, int ranks, int rank, int device) {
  if (ranks > RANKS) fake_die("ncclCommInitRank: %d ranks; at most %d", ranks, RANKS);
  comm *c = calloc(1, sizeof *c);
  snprintf(c->name, sizeof c->name, "%s/%s", folder(), name);
  c->rank = rank, c->ranks = ranks, c->device = device;
  c->bytes = sizeof(hall) + (size_t)ranks * 2 * CHUNK + (size_t)ranks * ranks * sizeof(ring);
  int file = open(c->name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, c->bytes)) fake_die("ncclCommInitRank: %s cannot be made", c->name);
  c->hall = mmap(NULL, c->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (c->hall == MAP_FAILED) fake_die("ncclCommInitRank: %s cannot be mapped", c->name);
  atomic_store(&c->hall->seats[rank].device, fake_physical(device) + 1);
  atomic_store(&c->hall->seats[rank].joined, 1);
  return c;
}
static int gather(comm *c) { /* wait for all ranks, as ncclCommInitRank does */
  double limit = now() + fake_setting("FAKE_CUDA_NCCL_SECONDS", 300);
  for (int r = 0; r < c->ranks; r++)
    while (!atomic_load(&c->hall->seats[r].joined)) {
      if (now() > limit) { fake_note("ncclCommInitRank: rank %d of %d did not come", r, c->ranks); return SYSTEM; }
      usleep(500);
    }
  for (int a = 0; a < c->ranks; a++)
    for (int b = 0; b < a; b++)
      if (atomic_load(&c->hall->seats[a].device) == atomic_load(&c->hall->seats[b].device)) {
        fake_note("ncclCommInitRank: ranks %d and %d are both on device %d", b, a, atomic_load(&c->hall->seats[a].device) - 1);
        return INVALID_USAGE;
      }
  if (atomic_fetch_add(&c->hall->ready, 1) == c->ranks - 1) unlink(c->name);
  return OK;
}
int ncclCommInitRank(comm **c, int ranks, unique_id id, int rank) {
  *c = enter(id.bytes, ranks, rank, fake_device());
  return depth ? OK : gather(*c);
}
int ncclCommInitRankConfig(comm **c, int ranks, unique_id id, int rank, void *config) {
  (void)config;
  *c = enter(id.bytes, ranks, rank, fake_device());
  return depth ? OK : gather(*c);
}
int ncclCommInitRankScalable(comm **c, int ranks, int rank, int ids, char *id, void *config) {
  (void)ids, (void)config;
  *c = enter(id, ranks, rank, fake_device());
  return depth ? OK : gather(*c);
}
int ncclCommInitAll(comm **all, int count, const int *devices) {
  char id[128];
  ncclGetUniqueId(id);
  for (int i = 0; i < count; i++) all[i] = enter(id, count, i, devices ? devices[i] : i);
  for (int i = 0; i < count; i++) { int e = gather(all[i]); if (e) return e; }
  return OK;
}
int ncclCommSplit(comm *c, int color, int key, comm **made, void *config) {
  (void)config;
  hall *h = c->hall;
  uint64_t number = ++c->splits;
  for (int r = 0; r < c->ranks; r++) /* nobody may still read the split before */
    while (number > 1 && atomic_load(&h->seats[r].splits) < 2 * (number - 1)) usleep(200);
  atomic_store(&h->seats[c->rank].split_color, color), atomic_store(&h->seats[c->rank].split_key, key);
  atomic_store(&h->seats[c->rank].splits, 2 * number - 1);
  int rank = 0, ranks = 0;
  for (int r = 0; r < c->ranks; r++)
    while (atomic_load(&h->seats[r].splits) < 2 * number - 1) usleep(200);
  for (int r = 0; r < c->ranks; r++) {
    if (atomic_load(&h->seats[r].split_color) != color) continue;
    int other = atomic_load(&h->seats[r].split_key);
    rank += other < key || (other == key && r < c->rank), ranks++;
  }
  atomic_store(&h->seats[c->rank].splits, 2 * number);
  *made = NULL;
  if (color < 0) return OK;
  char name[96];
  snprintf(name, sizeof name, "%.60s-%lu-%d", strrchr(c->name, '/') + 1, (unsigned long)number, color);
  *made = enter(name, ranks, rank, c->device);
  return gather(*made);
}
int ncclCommCount(comm *c, int *n) { *n = c->ranks; return OK; }
int ncclCommUserRank(comm *c, int *r) { *r = c->rank; return OK; }
int ncclCommCuDevice(comm *c, int *d) { *d = c->device; return OK; }
int ncclCommGetAsyncError(comm *c, int *e) { (void)c; *e = OK; return OK; }
int ncclCommFinalize(comm *c) { (void)c; return OK; }
int ncclCommDestroy(comm *c) { if (!over(c)) fake_finish(c->last); return OK; } /* its memory stays: items may name it */
/* Buffers need no registration here: what a call is given is checked at the call. */
int ncclCommRegister(comm *c, void *buffer, size_t bytes, void **handle) { (void)c, (void)bytes; *handle = buffer; return OK; }
int ncclCommDeregister(comm *c, void *handle) { (void)c, (void)handle; return OK; }
int ncclCommAbort(comm *c) { atomic_store(&c->aborted, 1); return OK; }
const char *ncclGetErrorString(int e) { return e == OK ? "no error" : e == INVALID_USAGE ? "invalid usage" : e == INVALID_ARGUMENT ? "invalid argument" : "unhandled system error"; }
const char *ncclGetLastError(comm *c) { (void)c; return ""; }
