/* The CUDA runtime that torch's libraries ask for: memory of the host, streams as queues (queue.c), kernels that do
 * nothing. Copies and memsets are done for real, as items of their stream. What is not here aborts with its name
 * (build.py writes those). Settings: FAKE_CUDA_DEVICES, FAKE_CUDA_GPU (A100, H100, T4), FAKE_CUDA_MEMORY (MiB a device),
 * FAKE_CUDA_SCHEDULE, FAKE_CUDA_SEED; CUDA_VISIBLE_DEVICES as on a GPU. */
#define _GNU_SOURCE
#include "fake.h"
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

stream *fake_make_stream(int device);
void fake_wait(stream *on, point until);
point fake_end(stream *on);
void fake_finish_device(int device);
typedef struct mark mark;
mark *fake_mark(void);
bool fake_passed(mark *);

/* ---- settings, errors, devices ---- */
static void say(const char *format, va_list args) {
  char text[512];
  vsnprintf(text, sizeof text, format, args);
  fprintf(stderr, "fake CUDA: %s\n", text);
}

void fake_note(const char *format, ...) {
  va_list args;
  va_start(args, format);
  say(format, args);
  va_end(args);
}

void fake_die(const char *format, ...) {
  va_list args;
  va_start(args, format);
  say(format, args);
  va_end(args);
  fflush(stderr);
  void *frames[40];
  if (getenv("FAKE_CUDA_STACK")) backtrace_symbols_fd(frames, backtrace(frames, 40), 2);
  abort();
}

long fake_setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

typedef struct {
  const char *name;
  int major, minor, processors, shared_kb, clock_khz;
  long memory_mb;
} card;
static const card CARDS[] = {
    {"NVIDIA A100-SXM4-80GB", 8, 0, 108, 164, 1410000, 81920},
    {"NVIDIA H100 80GB HBM3", 9, 0, 132, 228, 1980000, 81920},
    {"Tesla T4", 7, 5, 40, 64, 1590000, 15360},
};
static const card *the_card(void) {
  const char *asked = getenv("FAKE_CUDA_GPU");
  if (!asked || !strcmp(asked, "A100")) return &CARDS[0];
  if (!strcmp(asked, "H100")) return &CARDS[1];
  if (!strcmp(asked, "T4")) return &CARDS[2];
  fake_die("FAKE_CUDA_GPU=%s is none of A100, H100, T4", asked);
}

static int visible[MAX_DEVICES], visible_count = -1;
static pid_t first_user; /* the process that used the devices first; its forked children cannot */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void look(void) {
  int all = (int)fake_setting("FAKE_CUDA_DEVICES", 1);
  if (all < 0 || all > MAX_DEVICES) fake_die("FAKE_CUDA_DEVICES=%d: 0 to %d devices are there", all, MAX_DEVICES);
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  visible_count = 0;
  if (!list) {
    for (int i = 0; i < all; i++) visible[visible_count++] = i;
  } else {
    char *copy = strdup(list), *rest = copy, *word;
    while ((word = strsep(&rest, ","))) {
      char *end;
      long index = strtol(word, &end, 10);
      if (end == word && !strncmp(word, "GPU-", 4)) index = strtol(word + strlen(word) - 12, &end, 10);
      if (end == word || index < 0 || index >= all) break; /* as the driver: what follows a wrong one is hidden */
      if (visible_count < MAX_DEVICES) visible[visible_count++] = (int)index;
    }
    free(copy);
  }
  first_user = getpid();
}
static int count(void) { pthread_once(&once, look); return visible_count; }
int fake_devices(void) { return count(); }
int fake_physical(int device) { count(); return visible[device]; }
bool fake_alive(void) { count(); return first_user == getpid(); }

static __thread int device_of_thread;
static __thread cudaError_t last_error;
static __thread int suppressed;
int fake_device(void) { return device_of_thread; }
bool fake_suppressed(void) { return suppressed > 0; }
void fake_enter_operator(void) { suppressed++; }
void fake_leave_operator(void) { suppressed--; }

static cudaError_t error(cudaError_t e) { return last_error = e; }
#define LIVE()                                                       \
  do {                                                               \
    if (!fake_alive()) return error(cudaErrorInitializationError);   \
    if (!count()) return error(cudaErrorNoDevice);                   \
  } while (0)

cudaError_t cudaGetDeviceCount(int *n) { *n = count(); if (!fake_alive()) return error(cudaErrorInitializationError); return *n ? cudaSuccess : error(cudaErrorNoDevice); }
cudaError_t cudaGetDevice(int *d) { LIVE(); *d = device_of_thread; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { LIVE(); if (d < 0 || d >= count()) return error(cudaErrorInvalidDevice); device_of_thread = d; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { LIVE(); fake_finish_device(device_of_thread); return cudaSuccess; }
cudaError_t cudaGetLastError(void) { cudaError_t e = last_error; last_error = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *yes, int a, int b) { (void)a, (void)b; *yes = 0; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int n, int d) { snprintf(id, n, "0000:%02X:00.0", 16 + fake_physical(d)); return cudaSuccess; }

const char *cudaGetErrorName(cudaError_t e) {
  switch ((int)e) {
  case cudaSuccess: return "cudaSuccess";
  case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
  case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
  case cudaErrorInitializationError: return "cudaErrorInitializationError";
  case cudaErrorNoDevice: return "cudaErrorNoDevice";
  case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
  case cudaErrorNotReady: return "cudaErrorNotReady";
  case cudaErrorNotSupported: return "cudaErrorNotSupported";
  case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
  case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
  case cudaErrorPeerAccessUnsupported: return "cudaErrorPeerAccessUnsupported";
  default: return "cudaError";
  }
}
const char *cudaGetErrorString(cudaError_t e) {
  switch ((int)e) {
  case cudaSuccess: return "no error";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInitializationError: return "initialization error";
  case cudaErrorNoDevice: return "no CUDA-capable device is detected";
  case cudaErrorInvalidDevice: return "invalid device ordinal";
  case cudaErrorNotReady: return "device not ready";
  case cudaErrorNotSupported: return "operation not supported (by the fake CUDA)";
  case cudaErrorInvalidValue: return "invalid argument";
  default: return cudaGetErrorName(e);
  }
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  LIVE();
  if (d < 0 || d >= count()) return error(cudaErrorInvalidDevice);
  const card *c = the_card();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c->name);
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = 0;
  p->uuid.bytes[15] = (char)fake_physical(d);
  p->totalGlobalMem = (size_t)fake_setting("FAKE_CUDA_MEMORY", c->memory_mb) << 20;
  p->sharedMemPerBlock = 49152, p->regsPerBlock = 65536, p->warpSize = 32, p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024, p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536, p->major = c->major, p->minor = c->minor, p->textureAlignment = 512;
  p->multiProcessorCount = c->processors, p->canMapHostMemory = 1, p->concurrentKernels = 1;
  p->pciBusID = 16 + fake_physical(d), p->asyncEngineCount = 3, p->unifiedAddressing = 1, p->memoryBusWidth = 5120;
  p->l2CacheSize = 40 << 20, p->maxThreadsPerMultiProcessor = c->major == 7 ? 1024 : 2048;
  p->sharedMemPerMultiprocessor = (size_t)c->shared_kb << 10, p->regsPerMultiprocessor = 65536, p->managedMemory = 1;
  p->sharedMemPerBlockOptin = (size_t)(c->shared_kb - 1) << 10, p->maxBlocksPerMultiProcessor = c->major == 7 ? 16 : 32;
  p->reservedSharedMemPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
  LIVE();
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, d);
  switch ((int)a) {
  case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
  case cudaDevAttrMaxBlockDimX: *v = 1024; break;
  case cudaDevAttrMaxGridDimX: *v = p.maxGridSize[0]; break;
  case cudaDevAttrMaxGridDimY: *v = p.maxGridSize[1]; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *v = (int)p.sharedMemPerBlock; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = (int)p.sharedMemPerBlockOptin; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = (int)p.sharedMemPerMultiprocessor; break;
  case cudaDevAttrReservedSharedMemoryPerBlock: *v = 1024; break;
  case cudaDevAttrWarpSize: *v = 32; break;
  case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
  case cudaDevAttrMaxBlocksPerMultiprocessor: *v = p.maxBlocksPerMultiProcessor; break;
  case cudaDevAttrMaxRegistersPerBlock: *v = p.regsPerBlock; break;
  case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
  case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
  case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
  case cudaDevAttrClockRate: *v = the_card()->clock_khz; break;
  case cudaDevAttrMemoryClockRate: *v = 1215000; break;
  case cudaDevAttrGlobalMemoryBusWidth: *v = p.memoryBusWidth; break;
  case cudaDevAttrTextureAlignment: *v = 512; break;
  case cudaDevAttrPciBusId: *v = p.pciBusID; break;
  case cudaDevAttrPciDeviceId: case cudaDevAttrPciDomainId: *v = 0; break;
  case cudaDevAttrIntegrated: case cudaDevAttrPageableMemoryAccess: case cudaDevAttrConcurrentManagedAccess: *v = 0; break;
  case cudaDevAttrCooperativeLaunch: *v = 1; break;
  case cudaDevAttrMemoryPoolsSupported: *v = 0; break;
  case cudaDevAttrUnifiedAddressing: case cudaDevAttrCanMapHostMemory: *v = 1; break;
  default: fake_die("cudaDeviceGetAttribute: attribute %d has no value here", (int)a);
  }
  return cudaSuccess;
}

/* ---- memory: of the host, by sorted ranges ---- */
typedef struct { uintptr_t low, high; int device; kind kind; void *base; } range;
typedef struct leaving { void *base; size_t bytes; kind kind; mark *when; struct leaving *next; } leaving;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static range *ranges;
static size_t range_count, range_room;
static size_t used[MAX_DEVICES], peak[MAX_DEVICES], pinned_bytes;
static leaving *leavings;

static size_t place(uintptr_t p) { /* the first range that ends above p */
  size_t low = 0, high = range_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle].high <= p) low = middle + 1; else high = middle;
  }
  return low;
}
static void add_range(range r) {
  if (range_count == range_room) ranges = realloc(ranges, (range_room = range_room ? 2 * range_room : 64) * sizeof *ranges);
  size_t at = place(r.low);
  memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
  ranges[at] = r, range_count++;
}
static bool take_range(void *p, range *out) {
  size_t at = place((uintptr_t)p);
  if (at >= range_count || ranges[at].low != (uintptr_t)p) return false;
  *out = ranges[at];
  memmove(ranges + at, ranges + at + 1, (--range_count - at) * sizeof *ranges);
  return true;
}
region fake_region(const void *p) {
  region r = {UNKNOWN, -1, 0, 0};
  pthread_mutex_lock(&memory_lock);
  size_t at = place((uintptr_t)p);
  if (at < range_count && ranges[at].low <= (uintptr_t)p) r = (region){ranges[at].kind, ranges[at].device, ranges[at].low, ranges[at].high};
  pthread_mutex_unlock(&memory_lock);
  return r;
}

static void let_go(void *base, size_t bytes) { if (base) munmap(base, bytes); }
static void sweep(void) { /* freed memory leaves when what was queued before is done: a kernel may still read it */
  for (leaving **l = &leavings; *l;) {
    leaving *gone = *l;
    if (fake_passed(gone->when)) {
      *l = gone->next;
      let_go(gone->base, gone->bytes);
      free(gone->when), free(gone);
    } else
      l = &gone->next;
  }
}

static size_t limit_of(int d) { (void)d; return (size_t)fake_setting("FAKE_CUDA_MEMORY", the_card()->memory_mb) << 20; }

static void *map(size_t bytes) {
  void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}
static size_t whole_pages(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

cudaError_t cudaMalloc(void **p, size_t bytes) {
  LIVE();
  if (!bytes) { *p = NULL; return cudaSuccess; }
  size_t room = whole_pages(bytes);
  int d = device_of_thread;
  pthread_mutex_lock(&memory_lock);
  sweep();
  bool fits = used[d] + room <= limit_of(d);
  if (fits) { used[d] += room; if (used[d] > peak[d]) peak[d] = used[d]; }
  pthread_mutex_unlock(&memory_lock);
  void *base = fits ? map(room) : NULL;
  if (!base) return error(cudaErrorMemoryAllocation);
  /* 0xFF is NaN in every float, -1 in every integer; by an odd seed a large float instead. */
  memset(base, fake_setting("FAKE_CUDA_SEED", 0) % 2 ? 0x7B : 0xFF, bytes);
  pthread_mutex_lock(&memory_lock);
  add_range((range){(uintptr_t)base, (uintptr_t)base + room, d, DEVICE, base});
  pthread_mutex_unlock(&memory_lock);
  *p = base;
  return cudaSuccess;
}

static cudaError_t release(void *p, kind wanted, const char *name) {
  if (!p) return cudaSuccess;
  LIVE();
  pthread_mutex_lock(&memory_lock);
  range r;
  bool found = take_range(p, &r);
  if (found && r.kind == wanted) {
    if (r.kind == DEVICE) used[r.device] -= r.high - r.low; else pinned_bytes -= r.high - r.low;
    leaving *l = malloc(sizeof *l);
    *l = (leaving){r.base, r.high - r.low, r.kind, fake_mark(), leavings};
    leavings = l;
    sweep();
  }
  pthread_mutex_unlock(&memory_lock);
  if (!found || r.kind != wanted) fake_die("%s: %p was not allocated by the call that it belongs to", name, p);
  return cudaSuccess;
}
cudaError_t cudaFree(void *p) { return release(p, DEVICE, "cudaFree"); }
cudaError_t cudaFreeHost(void *p) { return release(p, PINNED, "cudaFreeHost"); }

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags) {
  (void)flags;
  LIVE();
  size_t room = whole_pages(bytes ? bytes : 1);
  if (!(*p = map(room))) return error(cudaErrorMemoryAllocation);
  pthread_mutex_lock(&memory_lock);
  add_range((range){(uintptr_t)*p, (uintptr_t)*p + room, device_of_thread, PINNED, *p});
  pinned_bytes += room;
  pthread_mutex_unlock(&memory_lock);
  return cudaSuccess;
}
/* A mapped file of a disk cannot be registered: seen on an H100, driver 580. Memory without a file, or of shmem, can. */
static bool of_a_disk(const void *p) {
  FILE *maps = fopen("/proc/self/maps", "r");
  char line[4300], name[4200];
  bool found = false;
  while (maps && !found && fgets(line, sizeof line, maps)) {
    unsigned long low, high;
    name[0] = 0;
    if (sscanf(line, "%lx-%lx %*s %*s %*s %*s %4199s", &low, &high, name) < 2) continue;
    if ((uintptr_t)p < low || (uintptr_t)p >= high) continue;
    found = name[0] == '/' && strncmp(name, "/dev/shm/", 9) && strncmp(name, "/memfd:", 7) && strncmp(name, "/dev/zero", 9);
    break;
  }
  if (maps) fclose(maps);
  return found;
}
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags) {
  (void)flags;
  LIVE();
  if (of_a_disk(p)) return error(cudaErrorInvalidValue);
  pthread_mutex_lock(&memory_lock);
  add_range((range){(uintptr_t)p, (uintptr_t)p + bytes, device_of_thread, PINNED, NULL});
  pinned_bytes += bytes;
  pthread_mutex_unlock(&memory_lock);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *p) { return release(p, PINNED, "cudaHostUnregister"); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  LIVE();
  pthread_mutex_lock(&memory_lock);
  *total = limit_of(device_of_thread), *free_bytes = *total - used[device_of_thread];
  pthread_mutex_unlock(&memory_lock);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  LIVE();
  memset(a, 0, sizeof *a);
  region r = fake_region(p);
  a->type = r.kind == DEVICE ? cudaMemoryTypeDevice : r.kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = r.kind == UNKNOWN ? -2 : r.device;
  a->devicePointer = r.kind == UNKNOWN ? NULL : (void *)p;
  a->hostPointer = r.kind == DEVICE ? NULL : (void *)p;
  return cudaSuccess;
}

/* ---- copies ---- */
typedef struct { item it; void *to; const void *from; void *taken; size_t bytes, rows, to_pitch, from_pitch; int value; } move;
static bool move_step(item *it) {
  move *m = (move *)it;
  for (size_t row = 0; row < m->rows; row++) {
    char *to = (char *)m->to + row * m->to_pitch;
    if (m->from) memmove(to, (const char *)m->from + row * m->from_pitch, m->bytes); else memset(to, m->value, m->bytes);
  }
  return true;
}
static void move_drop(item *it) { free(((move *)it)->taken), free(it); }

static void inside(const void *p, size_t bytes, const char *name, const char *side) {
  region r = fake_region(p);
  if (r.kind != UNKNOWN && (uintptr_t)p + bytes > r.high) fake_die("%s: its %s ends %zu bytes behind its memory", name, side, (size_t)((uintptr_t)p + bytes - r.high));
}

static cudaError_t enqueue_move(move m, stream *on, bool waits, const char *name) {
  LIVE();
  if (!m.bytes || !m.rows) return cudaSuccess;
  size_t span = (m.rows - 1) * m.to_pitch + m.bytes;
  inside(m.to, span, name, "target");
  region to = fake_region(m.to), from = {UNKNOWN, -1, 0, 0};
  if (m.from) {
    span = (m.rows - 1) * m.from_pitch + m.bytes;
    inside(m.from, span, name, "source");
    from = fake_region(m.from);
  }
  if (fake_suppressed() && to.kind == DEVICE && (!m.from || from.kind == DEVICE)) return cudaSuccess;
  if (m.from && from.kind == UNKNOWN) { /* pageable: the bytes are taken now, as by the driver's staging */
    m.taken = malloc(span);
    memcpy(m.taken, m.from, span);
    m.from = m.taken;
  }
  move *queued = malloc(sizeof m);
  *queued = m;
  queued->it = (item){.step = move_step, .drop = move_drop, .name = name};
  point at = fake_submit(on, &queued->it);
  if (waits || to.kind == UNKNOWN) fake_finish(at); else fake_settle();
  return cudaSuccess;
}
#define MOVE(dst, src, n) (move){.to = dst, .from = src, .bytes = n, .rows = 1}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n, enum cudaMemcpyKind k, cudaStream_t s) { (void)k; LIVE(); return enqueue_move(MOVE(to, from, n), fake_stream(s), false, "cudaMemcpyAsync"); }
cudaError_t cudaMemcpy(void *to, const void *from, size_t n, enum cudaMemcpyKind k) { (void)k; LIVE(); return enqueue_move(MOVE(to, from, n), fake_stream(NULL), true, "cudaMemcpy"); }
cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t n, cudaStream_t s) {
  LIVE();
  region t = fake_region(to), f = fake_region(from);
  if (n && (t.kind != DEVICE || t.device != a || f.kind != DEVICE || f.device != b))
    fake_die("cudaMemcpyPeerAsync: target on device %d, not %d, or source on device %d, not %d", t.device, a, f.device, b);
  return enqueue_move(MOVE(to, from, n), fake_stream(s), false, "cudaMemcpyPeerAsync");
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t tp, const void *from, size_t fp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t s) {
  (void)k;
  LIVE();
  return enqueue_move((move){.to = to, .from = from, .bytes = w, .rows = h, .to_pitch = tp, .from_pitch = fp}, fake_stream(s), false, "cudaMemcpy2DAsync");
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t n, cudaStream_t s) { LIVE(); return enqueue_move((move){.to = to, .bytes = n, .rows = 1, .value = value}, fake_stream(s), false, "cudaMemsetAsync"); }
cudaError_t cudaMemset(void *to, int value, size_t n) { LIVE(); return enqueue_move((move){.to = to, .bytes = n, .rows = 1, .value = value}, fake_stream(NULL), true, "cudaMemset"); }

/* ---- streams ---- */
static long streams_live, events_live;
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  (void)flags, (void)priority;
  LIVE();
  *s = (cudaStream_t)fake_make_stream(device_of_thread);
  __atomic_add_fetch(&streams_live, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { (void)s; __atomic_sub_fetch(&streams_live, 1, __ATOMIC_RELAXED); return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { LIVE(); fake_finish(fake_end(fake_stream(s))); return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) {
  LIVE();
  point at = fake_end(fake_stream(s));
  if (fake_done(at)) return cudaSuccess;
  fake_time_passed(at);
  return cudaErrorNotReady;
}
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { (void)s; *p = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) { (void)s; *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  (void)s, (void)g, (void)d, (void)e;
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (n) *n = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { (void)m; return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
  (void)s, (void)m;
  fake_note("CUDA graphs cannot be captured here");
  return error(cudaErrorNotSupported);
}

typedef struct { item it; cudaHostFn_t call; void *data; } called;
static bool call_step(item *it) { ((called *)it)->call(((called *)it)->data); return true; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) {
  LIVE();
  called *c = calloc(1, sizeof *c);
  *c = (called){.it = {.step = call_step, .name = "cudaLaunchHostFunc"}, .call = call, .data = data};
  fake_submit(fake_stream(s), &c->it);
  fake_settle();
  return cudaSuccess;
}

/* ---- events ---- */
typedef struct { int users; double at; } stamp;
typedef struct { point at; stamp *when; int device; bool timed; } event;
typedef struct { item it; stamp *when; } stamping;
static double seconds(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }
static void forget(stamp *s) { if (s && __atomic_sub_fetch(&s->users, 1, __ATOMIC_ACQ_REL) == 0) free(s); }
static bool stamp_step(item *it) { ((stamping *)it)->when->at = seconds(); return true; }
static void stamp_drop(item *it) { forget(((stamping *)it)->when), free(it); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  LIVE();
  event *made = calloc(1, sizeof *made);
  made->device = device_of_thread, made->timed = !(flags & cudaEventDisableTiming);
  *e = (cudaEvent_t)made;
  long live = __atomic_add_fetch(&events_live, 1, __ATOMIC_RELAXED);
  if (live > fake_setting("FAKE_CUDA_EVENTS", 20000)) fake_die("cudaEventCreate: %ld events are alive: they leak", live);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { event *v = (event *)e; if (fake_alive()) { forget(v->when); free(v); __atomic_sub_fetch(&events_live, 1, __ATOMIC_RELAXED); } return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
  LIVE();
  event *v = (event *)e;
  stream *on = fake_stream(s);
  if (fake_stream_device(on) != v->device) { /* as CUDA: another device's event cannot be recorded */
    fake_note("cudaEventRecord: an event of device %d in a stream of device %d", v->device, fake_stream_device(on));
    return error(cudaErrorInvalidResourceHandle);
  }
  stamping *made = calloc(1, sizeof *made);
  made->it = (item){.step = stamp_step, .drop = stamp_drop, .name = "cudaEventRecord"};
  made->when = calloc(1, sizeof(stamp));
  made->when->users = 2;
  forget(v->when);
  v->when = made->when;
  v->at = fake_submit(on, &made->it);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned flags) { (void)flags; return cudaEventRecord(e, s); }
cudaError_t cudaEventQuery(cudaEvent_t e) {
  LIVE();
  event *v = (event *)e;
  if (fake_done(v->at)) return cudaSuccess;
  fake_time_passed(v->at);
  return cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) { LIVE(); fake_finish(((event *)e)->at); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags) { (void)flags; LIVE(); fake_wait(fake_stream(s), ((event *)e)->at); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  LIVE();
  event *x = (event *)a, *y = (event *)b;
  if (!x->timed || !y->timed || !x->when || !y->when) return error(cudaErrorInvalidResourceHandle);
  if (!fake_done(x->at) || !fake_done(y->at)) return error(cudaErrorNotReady);
  *ms = (float)((y->when->at - x->when->at) * 1e3);
  return cudaSuccess;
}

/* ---- memory and events of other processes: handles of the fake mean nothing elsewhere ---- */
static cudaError_t not_shared(const char *name) { fake_note("%s: memory is not shared between processes here", name); return error(cudaErrorNotSupported); }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) { (void)h, (void)p; return not_shared("cudaIpcGetMemHandle"); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { (void)h, (void)e; return not_shared("cudaIpcGetEventHandle"); }

/* ---- kernels: registered, launched, and nothing happens ---- */
void **__cudaRegisterFatBinary(void *binary) { (void)binary; static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **h) { (void)h; }
void __cudaUnregisterFatBinary(void **h) { (void)h; }
void __cudaRegisterFunction(void **h, const char *f, char *df, const char *n, int l, void *t, void *b, void *bd, void *gd, int *w) { (void)h, (void)f, (void)df, (void)n, (void)l, (void)t, (void)b, (void)bd, (void)gd, (void)w; }
void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int ext, size_t size, int c, int g) { (void)h, (void)v, (void)a, (void)n, (void)ext, (void)size, (void)c, (void)g; }
char __cudaInitModule(void **h) { (void)h; return 0; }
static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) { *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared, *stream = configuration.stream; return cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *entry) { *kernel = (cudaKernel_t)entry; return cudaSuccess; }

long fake_launches_alone; /* kernels launched outside an operator that is computed: their values are missing */
static cudaError_t launch(void) {
  LIVE();
  if (!suppressed) __atomic_add_fetch(&fake_launches_alone, 1, __ATOMIC_RELAXED);
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { (void)f, (void)g, (void)b, (void)a, (void)n, (void)s; return launch(); }
cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { (void)f, (void)g, (void)b, (void)a, (void)n, (void)s; return launch(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) { (void)c, (void)f, (void)a; return launch(); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) { (void)f, (void)g, (void)b, (void)a, (void)n, (void)s; return launch(); }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  (void)f;
  LIVE();
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->maxDynamicSharedSizeBytes = 49152;
  a->ptxVersion = a->binaryVersion = the_card()->major * 10 + the_card()->minor;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { (void)f, (void)a, (void)v; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { (void)f, (void)b, (void)s; *n = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned flags) { (void)f, (void)b, (void)s, (void)flags; *n = 2; return cudaSuccess; }
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t n, size_t offset, enum cudaMemcpyKind k) { (void)symbol, (void)from, (void)n, (void)offset, (void)k; return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  (void)version, (void)flags;
  static void *driver;
  if (!driver) driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  *entry = driver ? dlsym(driver, name) : NULL;
  if (result) *result = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*entry) fake_note("the driver has no %s here", name);
  return *entry ? cudaSuccess : error(cudaErrorNotSupported);
}

/* ---- what tests ask ---- */
enum { STREAMS_LIVE, EVENTS_LIVE, PINNED_BYTES, DEVICE_BYTES, PEAK_BYTES, LAUNCHES_ALONE };
long fake_count(int what, int device) {
  switch (what) {
  case STREAMS_LIVE: return streams_live;
  case EVENTS_LIVE: return events_live;
  case PINNED_BYTES: return (long)pinned_bytes;
  case DEVICE_BYTES: return (long)used[device];
  case PEAK_BYTES: return (long)peak[device];
  case LAUNCHES_ALONE: return fake_launches_alone;
  default: return -1;
  }
}
