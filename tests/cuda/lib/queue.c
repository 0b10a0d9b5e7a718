/* Streams as queues, and the one thread that works them off.
 *
 * A stream keeps what was put into it until somebody must see the result, or until the schedule of this run does it
 * earlier. So a wait that a program lacks shows as wrong numbers, and the same seed shows it again:
 *   default-late  the default streams run only when something waits for them, the others at once
 *   side-late     the others run only when something waits for them, the default streams at once
 *   random        by FAKE_CUDA_SEED
 *   immediate     everything at once: no races are shown
 * Items run in one thread, so that they meet neither a caller's locks nor its thread-local state. A thread that waits
 * gives Python's lock away, since items call Python. */
#define _GNU_SOURCE
#include "fake.h"
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

struct stream {
  int device;
  bool is_default, in_step, started;
  item *head, *tail;
  uint64_t submitted, done;
  stream *next;
};

typedef struct { item it; point at; } wait_item;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER, progress = PTHREAD_COND_INITIALIZER;
static stream *streams, *defaults[MAX_DEVICES];
static point goals[64];
static int goal_count, settling;
static bool thread_runs;
static uint64_t rng, free_steps;
static double last_progress;
static enum { IMMEDIATE, DEFAULT_LATE, SIDE_LATE, RANDOM } schedule;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static uint32_t draw(uint32_t below) { /* xorshift64*: Vigna, "An experimental exploration of xorshift generators", 2016 */
  rng ^= rng >> 12, rng ^= rng << 25, rng ^= rng >> 27;
  return (uint32_t)((rng * 2685821657736338717ull) >> 33) % below;
}

/* ---- Python's lock: given away by a thread that waits; looked up, since this library does not link Python ---- */
static int (*python_runs)(void), (*python_held)(void);
static void *(*python_save)(void);
static void (*python_restore)(void *);

static void *leave_python(void) {
  if (!python_runs) {
    python_held = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    python_save = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
    python_restore = (void (*)(void *))dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
    python_runs = (int (*)(void))dlsym(RTLD_DEFAULT, "Py_IsInitialized");
  }
  return python_runs && python_runs() && python_held() ? python_save() : NULL;
}
static void enter_python(void *state) {
  if (state) python_restore(state);
}

/* ---- which item is next ---- */
static bool is_wait(item *it);
static bool done_locked(point at) { return !at.on || at.on->done >= at.number; }

static bool runnable(stream *s) {
  return s->head && !s->in_step && (!is_wait(s->head) || done_locked(((wait_item *)s->head)->at));
}

static bool eager(stream *s) {
  switch (schedule) {
  case IMMEDIATE: return true;
  case DEFAULT_LATE: return !s->is_default;
  case SIDE_LATE: return s->is_default;
  default: return false;
  }
}

/* The streams whose head a point needs: its own, or where that waits, the one it waits for. */
static void mark_needed(point at, bool (*visit)(stream *, void *), void *into, int depth) {
  if (done_locked(at) || depth > 64) return;
  stream *s = at.on;
  if (!s->head) return;
  if (is_wait(s->head) && !done_locked(((wait_item *)s->head)->at))
    mark_needed(((wait_item *)s->head)->at, visit, into, depth + 1);
  else
    visit(s, into);
}

typedef struct { stream *list[256]; int count; } candidates;
static bool add_candidate(stream *s, void *into) {
  candidates *c = into;
  if (!runnable(s)) return false;
  for (int i = 0; i < c->count; i++)
    if (c->list[i] == s) return true;
  if (c->count < 256) c->list[c->count++] = s;
  return true;
}

static unsigned turn; /* goes on after a step that did not finish, so that a collective starves nobody */

static stream *choose(void) {
  candidates c = {.count = 0};
  bool host_waits = settling || goal_count; /* else what runs would depend on how fast the host goes on */
  for (stream *s = streams; s; s = s->next)
    if (eager(s) && (host_waits || schedule == IMMEDIATE)) add_candidate(s, &c);
  for (stream *s = streams; s; s = s->next)
    if (s->head && s->head->wanted && s->head->wanted(s->head)) add_candidate(s, &c);
    else
      for (item *it = s->head; it; it = it->next)
        if (it->wanted && it->wanted(it)) {
          uint64_t number = s->done;
          for (item *before = s->head; before != it; before = before->next) number++;
          mark_needed((point){s, number + 1}, add_candidate, &c, 0);
          break;
        }
  for (int i = 0; i < goal_count; i++) mark_needed(goals[i], add_candidate, &c, 0);
  if (schedule == RANDOM && host_waits && ((settling && free_steps) || (goal_count && draw(3) == 0))) {
    for (stream *s = streams; s; s = s->next) add_candidate(s, &c);
    if (!goal_count) free_steps--;
  }
  return c.count ? c.list[schedule == RANDOM && host_waits ? draw(c.count) : turn % c.count] : NULL;
}

static void drop_done_goals(void) {
  int kept = 0;
  for (int i = 0; i < goal_count; i++)
    if (!done_locked(goals[i])) goals[kept++] = goals[i];
  goal_count = kept;
}

static bool asks_outside(void) {
  for (stream *s = streams; s; s = s->next)
    for (item *it = s->head; it; it = it->next)
      if (it->wanted) return true;
  return false;
}

static bool busy, stuck; /* an item runs now; every item that could run waits for a peer */

static void *run(void *nothing) {
  (void)nothing;
  pthread_mutex_lock(&lock);
  int idle_turns = 0;
  for (;;) {
    stream *s = choose();
    if (!s) {
      busy = false;
      pthread_cond_broadcast(&progress);
      if (asks_outside()) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 2000000;
        if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        pthread_cond_timedwait(&work, &lock, &until);
      } else
        pthread_cond_wait(&work, &lock);
      continue;
    }
    busy = true;
    item *it = s->head;
    s->in_step = true;
    pthread_mutex_unlock(&lock);
    bool finished = it->step ? it->step(it) : true;
    pthread_mutex_lock(&lock);
    s->in_step = false;
    if (finished) {
      s->head = it->next;
      if (!s->head) s->tail = NULL;
      s->done++;
      last_progress = now();
      idle_turns = 0;
      stuck = false;
      drop_done_goals();
      pthread_cond_broadcast(&progress);
      pthread_mutex_unlock(&lock);
      it->drop ? it->drop(it) : free(it);
      pthread_mutex_lock(&lock);
    } else if (turn++, ++idle_turns > 8) { /* peers in other processes need a processor too */
      stuck = true;
      pthread_cond_broadcast(&progress);
      pthread_mutex_unlock(&lock);
      usleep(idle_turns > 4000 ? 20000 : idle_turns > 400 ? 1000 : 50); /* waits of minutes leave others the processor */
      pthread_mutex_lock(&lock);
    }
  }
  return NULL;
}

static void start_thread(void) { /* with the lock held */
  if (thread_runs) return;
  const char *name = getenv("FAKE_CUDA_SCHEDULE");
  schedule = !name || !strcmp(name, "immediate") ? IMMEDIATE
             : !strcmp(name, "default-late")     ? DEFAULT_LATE
             : !strcmp(name, "side-late")        ? SIDE_LATE
             : !strcmp(name, "random")           ? RANDOM
                                                 : (fake_die("FAKE_CUDA_SCHEDULE=%s is none of immediate, default-late, side-late, random", name), 0);
  rng = 88172645463325252ull + 7919 * (uint64_t)fake_setting("FAKE_CUDA_SEED", 0);
  for (int i = 0; i < 8; i++) draw(2);
  pthread_t thread;
  if (pthread_create(&thread, NULL, run, NULL)) fake_die("the thread of the queues cannot be started");
  pthread_detach(thread);
  last_progress = now();
  thread_runs = true;
}

/* ---- what the others call ---- */
static stream *new_stream(int device, bool is_default) {
  stream *s = calloc(1, sizeof *s);
  s->device = device, s->is_default = is_default;
  stream **end = &streams;
  while (*end) end = &(*end)->next;
  *end = s;
  return s;
}

stream *fake_make_stream(int device) {
  pthread_mutex_lock(&lock);
  stream *s = new_stream(device, false);
  pthread_mutex_unlock(&lock);
  return s;
}

stream *fake_stream(void *handle) {
  if ((uintptr_t)handle > 2) return handle;
  int device = fake_device();
  pthread_mutex_lock(&lock);
  if (!defaults[device]) defaults[device] = new_stream(device, true);
  stream *s = defaults[device];
  pthread_mutex_unlock(&lock);
  return s;
}

int fake_stream_device(stream *on) { return on->device; }

static bool wait_step(item *it) { (void)it; return true; }
static bool is_wait(item *it) { return it->step == wait_step; }

static point submit_locked(stream *on, item *it) {
  start_thread();
  it->next = NULL;
  if (on->tail) on->tail->next = it; else on->head = it;
  on->tail = it;
  if (schedule == RANDOM) free_steps += draw(4) == 0 ? draw(3) : 0;
  point at = {on, ++on->submitted};
  return at;
}

point fake_submit(stream *on, item *it) {
  pthread_mutex_lock(&lock);
  point at = submit_locked(on, it);
  pthread_cond_signal(&work);
  pthread_mutex_unlock(&lock);
  return at;
}

void fake_wait(stream *on, point until) {
  pthread_mutex_lock(&lock);
  if (!done_locked(until)) {
    wait_item *w = calloc(1, sizeof *w);
    w->it.step = wait_step, w->it.name = "wait", w->at = until;
    submit_locked(on, &w->it);
    pthread_cond_signal(&work);
  }
  pthread_mutex_unlock(&lock);
}

point fake_end(stream *on) {
  pthread_mutex_lock(&lock);
  point at = {on, on->submitted};
  pthread_mutex_unlock(&lock);
  return at;
}

bool fake_done(point at) {
  pthread_mutex_lock(&lock);
  bool done = done_locked(at);
  pthread_mutex_unlock(&lock);
  return done;
}

void fake_finish(point at) {
  if (fake_done(at)) return;
  void *python = leave_python();
  pthread_mutex_lock(&lock);
  while (goal_count == 64) pthread_cond_wait(&progress, &lock);
  goals[goal_count++] = at;
  pthread_cond_signal(&work);
  while (!done_locked(at)) pthread_cond_wait(&progress, &lock);
  pthread_mutex_unlock(&lock);
  enter_python(python);
}

void fake_finish_device(int device) { /* device < 0: all devices */
  for (;;) {
    point open = {0};
    pthread_mutex_lock(&lock);
    for (stream *s = streams; s && !open.on; s = s->next)
      if ((device < 0 || s->device == device) && s->done < s->submitted) open = (point){s, s->submitted};
    pthread_mutex_unlock(&lock);
    if (!open.on) return;
    fake_finish(open);
  }
}

void fake_settle(void) {
  void *python = leave_python();
  pthread_mutex_lock(&lock);
  if (thread_runs) {
    settling++, busy = true;
    pthread_cond_signal(&work);
    while (busy && !stuck) pthread_cond_wait(&progress, &lock);
    settling--;
  }
  pthread_mutex_unlock(&lock);
  enter_python(python);
}

void fake_time_passed(point at) {
  pthread_mutex_lock(&lock);
  if (!done_locked(at) && now() - last_progress > 0.3 && goal_count < 64) {
    goals[goal_count++] = at;
    pthread_cond_signal(&work);
  }
  pthread_mutex_unlock(&lock);
}

/* Memory may be given back when everything that was queued by now is done: a mark, and the question. */
typedef struct { int count; point at[]; } mark;
mark *fake_mark(void) {
  pthread_mutex_lock(&lock);
  int count = 0;
  for (stream *s = streams; s; s = s->next) count += s->done < s->submitted;
  mark *m = malloc(sizeof *m + count * sizeof(point));
  m->count = 0;
  for (stream *s = streams; s; s = s->next)
    if (s->done < s->submitted) m->at[m->count++] = (point){s, s->submitted};
  pthread_mutex_unlock(&lock);
  return m;
}
bool fake_passed(mark *m) {
  for (int i = 0; i < m->count; i++)
    if (!fake_done(m->at[i])) return false;
  return true;
}
