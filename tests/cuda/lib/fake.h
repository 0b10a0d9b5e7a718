/* What the parts of the fake CUDA share: pointers, streams as queues, and the one thread that works them off. */
#ifndef FAKE_H
#define FAKE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_DEVICES 8

/* An item of a stream's queue. `step` returns true when the item is done; false asks to be called again later, after
   other streams had their turn (a collective waits for its peers). No lock is held while it runs. */
typedef struct item {
  bool (*step)(struct item *);
  void (*drop)(struct item *);
  bool (*wanted)(struct item *); /* whether somebody outside this process waits for it; may be NULL */
  const char *name;
  struct item *next;
} item;

typedef struct stream stream;
typedef struct { stream *on; uint64_t number; } point; /* a place in a queue: done once `number` items are */

typedef enum { UNKNOWN = 0, PINNED, DEVICE } kind;
typedef struct { kind kind; int device; uintptr_t low, high; } region;

void fake_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
void fake_note(const char *format, ...) __attribute__((format(printf, 1, 2)));
long fake_setting(const char *name, long otherwise);
bool fake_alive(void); /* false in a child forked after the first use, as on a GPU */
int fake_devices(void);
int fake_physical(int device); /* the index of a visible device among all of the machine */
int fake_device(void);         /* the calling thread's current device */

region fake_region(const void *pointer);

stream *fake_stream(void *handle); /* of a cudaStream_t; NULL is the current device's default stream */
int fake_stream_device(stream *on);
point fake_submit(stream *on, item *it);
void fake_finish(point at);  /* work queues off until `at` is done; releases Python's lock meanwhile */
void fake_settle(void);      /* work off what the schedule does at once */
void fake_time_passed(point at); /* somebody polls and nothing moves: let `at` come */
bool fake_done(point at);
bool fake_suppressed(void);  /* inside an operator's own kernels: their copies move nothing */
#endif
