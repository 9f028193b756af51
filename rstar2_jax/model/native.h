/* What the parts in C share: vectors of floats, the exponential, errors, and work that the threads of XLA take part in.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#ifdef __AVX512F__ /* read once into a register, where the compiler would read it again for each use */
#define HELD(x) __asm__("" : "+v"(x))
#else
#define HELD(x)
#endif

INLINE lanes load(const float *at) { return *(const lanes *)at; }
INLINE void store(float *at, lanes x) { *(lanes *)at = x; }
INLINE lanes chosen(ints where, lanes x, lanes y) { return (lanes)((where & (ints)x) | (~where & (ints)y)); }
INLINE int64_t rounded_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* e^x for x <= 0: 2^n times the Taylor polynomial of the rest, which is within ln(2)/2 of 0; NaN stays NaN. */
INLINE lanes exponential(lanes x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: what is added to it is rounded to an integer */
    lanes shifted = x * 1.44269504f + shift, n = shifted - shift;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = 1.0f + r * (1.0f / 7);
    for (int i = 6; i > 0; i--) y = 1.0f + r * y * (1.0f / i);
    words power = ((words)shifted - 0x4b400000u + 127u) << 23;
    ints tiny = x < -87.0f;
    return (lanes)((ints)(y * (lanes)power) & ~tiny);
}

/* Items of work that threads take one after another. The job is copied: a thread may come when its caller is gone. */
typedef void Item(const void *job, int64_t item, float *scratch);

typedef struct {
    Item *item;
    int64_t items, floats; /* floats: scratch memory of a thread */
    atomic_long next, done, holders;
    void *job;
} Team;

/* Takes items until none is left; nothing of the job is looked at once that is so, since its caller may be gone. */
static void work(Team *team, float *scratch) {
    long item;
    while ((item = atomic_fetch_add(&team->next, 1)) < team->items) {
        team->item(team->job, item, scratch);
        atomic_fetch_add(&team->done, 1);
    }
}

static void leave(Team *team) {
    if (atomic_fetch_sub(&team->holders, 1) == 1) free(team);
}

static float *scratch_of(int64_t floats) { return aligned_alloc(64, sizeof(float) * rounded_up(floats)); }

static void help(void *data) {
    Team *team = data;
    float *scratch = scratch_of(team->floats);
    if (scratch != NULL) work(team, scratch); /* without memory the others do its share */
    free(scratch);
    leave(team);
}

static XLA_FFI_Error *failure(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
    XLA_FFI_Error_Create_Args args = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, NULL, message, code};
    return frame->api->XLA_FFI_Error_Create(&args);
}

/* Wakes threads of XLA's pool, `wanted` with the caller's own at most. */
static void call_for_help(const XLA_FFI_CallFrame *frame, Team *team, int64_t wanted) {
    int64_t threads = 1;
    XLA_FFI_ThreadPool_NumThreads_Args asked = {XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx,
                                                &threads};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&asked);
    int64_t helpers = (threads < wanted ? threads : wanted) - 1;
    for (int64_t i = 0; error == NULL && i < helpers; i++) {
        XLA_FFI_ThreadPool_Schedule_Args args = {XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help,
                                                 team};
        atomic_fetch_add(&team->holders, 1);
        error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
        if (error != NULL) atomic_fetch_sub(&team->holders, 1);
    }
    if (error != NULL) { /* there is no pool: this thread does all of it */
        XLA_FFI_Error_Destroy_Args args = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
        frame->api->XLA_FFI_Error_Destroy(&args);
    }
}

/* All items of a job, by this thread and those of the pool that are worth waking; an error where memory is short. */
static XLA_FFI_Error *done_by_all(const XLA_FFI_CallFrame *frame, const void *job, size_t bytes, Item *item,
                                  int64_t items, int64_t floats, int64_t wanted) {
    size_t head = (sizeof(Team) + 63) / 64 * 64;
    Team *team = calloc(1, head + bytes);
    float *scratch = scratch_of(floats);
    if (team == NULL || scratch == NULL) {
        free(team);
        free(scratch);
        return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory for scratch");
    }
    team->item = item, team->items = items, team->floats = floats;
    team->job = memcpy((char *)team + head, job, bytes);
    atomic_store(&team->holders, 1);
    call_for_help(frame, team, wanted < items ? wanted : items);
    work(team, scratch);
    while (atomic_load(&team->done) < items) sched_yield(); /* what another thread has begun ends soon */
    free(scratch);
    leave(team);
    return NULL;
}

/* Whether XLA asks what this was made for, which is then told; or the stage is not the one that computes. */
static int nothing_to_compute(const XLA_FFI_CallFrame *frame) {
    if (frame->extension_start != NULL && frame->extension_start->type == XLA_FFI_Extension_Metadata) {
        XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;
        metadata->api_version.major_version = XLA_FFI_API_MAJOR;
        metadata->api_version.minor_version = XLA_FFI_API_MINOR;
        return 1;
    }
    return frame->stage != XLA_FFI_ExecutionStage_EXECUTE;
}
