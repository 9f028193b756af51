/* Causal attention within segments over whole rows on a CPU, forward and backward: see attention_native.py.
 *
 *     q, out [b, t, h, d]  k, v [b, t, k, d]  segments [b, t], each id one run of neighbours  stats [b, h, t, 2]
 *     a query sees the keys from the begin of its segment up to itself; stats: largest score, 1 / sum of weights
 *
 * An item of work is a row's key head with all its queries. Blocks of queries pass over the keys that any of them sees;
 * weights are computed again in the backward pass, so that nothing of size t x t is kept. What is computed of an item
 * depends on nothing else. Sums are made in float32.
 */
#include "native.h"

#define QUERIES 16 /* of a block; a multiple of TALL */
#define TALL 4     /* rows of a product that are taken together, */
#define WIDE 4     /* and vectors of columns: TALL * WIDE sums stay in registers */

static const int64_t COST_FOR_A_THREAD = 1 << 20; /* multiplications for which another thread is worth waking */

typedef struct {
    const float *q, *k, *v, *stats, *dout;
    const int32_t *segments;
    float *out, *made, *dq, *dk, *dv; /* made: stats on the way there */
    int64_t rows, tokens, heads, key_heads, width;
} Job;

typedef struct { /* a matrix of which element (i, j) is at[i * down + j * across] */
    const float *at;
    int64_t down, across;
} Matrix;

INLINE void tile(int wide, Matrix a, int64_t depth, const float *b, int64_t b_row, float *c, int64_t c_row, int add) {
    lanes sums[TALL][WIDE];
    for (int r = 0; r < TALL; r++)
        for (int i = 0; i < wide; i++) sums[r][i] = add ? load(c + r * c_row + i * LANES) : (lanes){0};
    for (int64_t k = 0; k < depth; k++) {
        lanes row[WIDE];
        for (int i = 0; i < wide; i++) {
            row[i] = load(b + k * b_row + i * LANES);
            HELD(row[i]);
        }
        for (int r = 0; r < TALL; r++)
            for (int i = 0; i < wide; i++) sums[r][i] += a.at[r * a.down + k * a.across] * row[i];
    }
    for (int r = 0; r < TALL; r++)
        for (int i = 0; i < wide; i++) store(c + r * c_row + i * LANES, sums[r][i]);
}

/* c [rows, columns] = a b, or c += a b; rows a multiple of TALL, columns of LANES. */
static void multiply(int64_t rows, int64_t columns, int64_t depth, Matrix a, const float *b, int64_t b_row, float *c,
                     int64_t c_row, int add) {
    for (int64_t j = 0; j < columns; j += WIDE * LANES)
        for (int64_t i = 0; i < rows; i += TALL) {
            Matrix own = {a.at + i * a.down, a.down, a.across};
            float *to = c + i * c_row + j;
            switch ((columns - j) / LANES) {
                case 1: tile(1, own, depth, b + j, b_row, to, c_row, add); break;
                case 2: tile(2, own, depth, b + j, b_row, to, c_row, add); break;
                case 3: tile(3, own, depth, b + j, b_row, to, c_row, add); break;
                default: tile(WIDE, own, depth, b + j, b_row, to, c_row, add);
            }
        }
}

/* What an item works in, cut from its scratch memory. */
typedef struct {
    int64_t tokens, width; /* rounded up to whole vectors */
    float *across, *along, *more_across, *dk, *dv;
    float *q, *own, *weights, *pulls, *sums;
    int32_t *begins;
} Room;

static int64_t room_floats(const Job *job) {
    int64_t t = rounded_up(job->tokens), d = rounded_up(job->width);
    return 5 * t * d + t + QUERIES * (2 * t + 3 * d);
}

static Room room(const Job *job, float *scratch) {
    int64_t t = rounded_up(job->tokens), d = rounded_up(job->width);
    Room r = {.tokens = t, .width = d, .across = scratch};
    r.along = r.across + t * d, r.more_across = r.along + t * d, r.dk = r.more_across + t * d, r.dv = r.dk + t * d;
    r.q = r.dv + t * d, r.own = r.q + QUERIES * d, r.sums = r.own + QUERIES * d;
    r.weights = r.sums + QUERIES * d, r.pulls = r.weights + QUERIES * t;
    r.begins = (int32_t *)(r.pulls + QUERIES * t);
    return r;
}

/* First key that each query of a row sees. */
static void find_begins(const Job *job, int64_t row, int32_t *begins) {
    const int32_t *ids = job->segments + row * job->tokens;
    for (int64_t i = 0; i < job->tokens; i++) begins[i] = i > 0 && ids[i] == ids[i - 1] ? begins[i - 1] : (int32_t)i;
}

/* [t, d] of one head of a row, whose tokens lie `apart`, as rows of whole vectors; what fills them up is zero. */
static void copy_along(const float *from, int64_t apart, int64_t count, int64_t rows, int64_t d, int64_t wide,
                       float factor, float *to) {
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; j < d; j++) to[i * wide + j] = factor * from[i * apart + j];
        for (int64_t j = d; j < wide; j++) to[i * wide + j] = 0;
    }
    memset(to + count * wide, 0, sizeof(float) * (rows - count) * wide);
}

/* The same with the tokens as columns. */
static void copy_across(const float *from, int64_t apart, int64_t count, int64_t columns, int64_t d, float *to) {
    for (int64_t at = 0; at < columns; at += LANES)
        for (int64_t j = 0; j < d; j++) {
            int64_t end = count < at + LANES ? count : at + LANES;
            for (int64_t i = at; i < end; i++) to[j * columns + i] = from[i * apart + j];
            for (int64_t i = end; i < at + LANES; i++) to[j * columns + i] = 0;
        }
}

typedef struct { /* of queries [lo, lo + count) of a head: keys [first, end) hold all that any of them sees */
    int64_t row, head, lo, count, tall, first, end;
} Block;

static Block block_at(const Job *job, const Room *r, int64_t row, int64_t head, int64_t lo) {
    int64_t count = job->tokens - lo < QUERIES ? job->tokens - lo : QUERIES;
    return (Block){.row = row, .head = head, .lo = lo, .count = count, .tall = (count + TALL - 1) / TALL * TALL,
                   .first = r->begins[lo] / LANES * LANES, .end = rounded_up(lo + count)};
}

static int64_t place(const Job *job, const Block *b) { /* of a block's first query in q, out and their gradients */
    return ((b->row * job->tokens + b->lo) * job->heads + b->head) * job->width;
}

static float *stats_of(const Job *job, const Block *b, const float *stats) {
    return (float *)stats + ((b->row * job->heads + b->head) * job->tokens + b->lo) * 2;
}

static float scale_of(const Job *job) { return 1 / __builtin_sqrtf((float)job->width); }

/* Scores of a block's queries, which are scaled. */
static void score(const Job *job, const Room *r, const Block *b) {
    copy_along(job->q + place(job, b), job->heads * job->width, b->count, b->tall, job->width, r->width, scale_of(job),
               r->q);
    multiply(b->tall, b->end - b->first, job->width, (Matrix){r->q, r->width, 1}, r->across + b->first, r->tokens,
             r->weights + b->first, r->tokens, 0);
}

/* Which of the keys at `at` ... a query between `begin` and itself sees. */
INLINE ints seen(int64_t at, int64_t begin, int64_t self) {
    ints index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    index += (int32_t)at;
    return (index >= (int32_t)begin) & (index <= (int32_t)self);
}

/* The scores of a query become weights, not yet divided by their sum. */
static void weigh(const Room *r, const Block *b, int64_t query, float *stats) {
    float *scores = r->weights + query * r->tokens, top = -__builtin_inff(), total = 0;
    int64_t self = b->lo + query, begin = r->begins[self];
    lanes least = (lanes){0} + top, tops = least, sums = {0};
    for (int64_t i = b->first; i < b->end; i += LANES) {
        lanes x = chosen(seen(i, begin, self), load(scores + i), least);
        store(scores + i, x);
        tops = chosen(x > tops, x, tops);
    }
    for (int i = 0; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    for (int64_t i = b->first; i < b->end; i += LANES) {
        lanes x = exponential(load(scores + i) - top);
        sums += x;
        store(scores + i, x);
    }
    for (int i = 0; i < LANES; i++) total += sums[i];
    stats[0] = top, stats[1] = 1 / total;
}

static void forward(const void *data, int64_t item, float *scratch) {
    const Job *job = data;
    Room r = room(job, scratch);
    int64_t row = item / job->key_heads, key_head = item % job->key_heads, group = job->heads / job->key_heads;
    int64_t apart = job->key_heads * job->width, from = (row * job->tokens * job->key_heads + key_head) * job->width;
    find_begins(job, row, r.begins);
    copy_across(job->k + from, apart, job->tokens, r.tokens, job->width, r.across);
    copy_along(job->v + from, apart, job->tokens, r.tokens, job->width, r.width, 1, r.along);
    for (int64_t head = key_head * group; head < (key_head + 1) * group; head++)
        for (int64_t lo = 0; lo < job->tokens; lo += QUERIES) {
            Block b = block_at(job, &r, row, head, lo);
            float *stats = stats_of(job, &b, job->made), *out = job->out + place(job, &b);
            score(job, &r, &b);
            for (int64_t i = 0; i < b.count; i++) weigh(&r, &b, i, stats + 2 * i);
            multiply(b.tall, r.width, b.end - b.first, (Matrix){r.weights + b.first, r.tokens, 1},
                     r.along + b.first * r.width, r.width, r.sums, r.width, 0);
            for (int64_t i = 0; i < b.count; i++)
                for (int64_t j = 0; j < job->width; j++)
                    out[i * job->heads * job->width + j] = r.sums[i * r.width + j] * stats[2 * i + 1];
        }
}

/* Weights of a query again, and the gradients of its scores in the place of those of its weights. */
static void pull(const Room *r, const Block *b, int64_t query, const float *stats) {
    float *weights = r->weights + query * r->tokens, *pulls = r->pulls + query * r->tokens, mean = 0;
    int64_t self = b->lo + query, begin = r->begins[self];
    lanes least = (lanes){0} - __builtin_inff(), sums = {0};
    for (int64_t i = b->first; i < b->end; i += LANES) {
        lanes x = exponential(chosen(seen(i, begin, self), load(weights + i) - stats[0], least)) * stats[1];
        sums += x * load(pulls + i);
        store(weights + i, x);
    }
    for (int i = 0; i < LANES; i++) mean += sums[i];
    for (int64_t i = b->first; i < b->end; i += LANES) store(pulls + i, load(weights + i) * (load(pulls + i) - mean));
}

static void backward_block(const Job *job, const Room *r, const Block *b) {
    int64_t keys = b->end - b->first, apart = job->heads * job->width, at = b->first * r->width;
    const float *stats = stats_of(job, b, job->stats);
    score(job, r, b);
    copy_along(job->dout + place(job, b), apart, b->count, b->tall, job->width, r->width, 1, r->own);
    multiply(b->tall, keys, job->width, (Matrix){r->own, r->width, 1}, r->more_across + b->first, r->tokens,
             r->pulls + b->first, r->tokens, 0);
    for (int64_t i = 0; i < b->count; i++) pull(r, b, i, stats + 2 * i);
    for (int64_t i = b->count; i < b->tall; i++) {
        memset(r->weights + i * r->tokens, 0, sizeof(float) * r->tokens);
        memset(r->pulls + i * r->tokens, 0, sizeof(float) * r->tokens);
    }
    multiply(b->tall, r->width, keys, (Matrix){r->pulls + b->first, r->tokens, 1}, r->along + at, r->width, r->sums,
             r->width, 0);
    multiply(keys, r->width, b->count, (Matrix){r->pulls + b->first, 1, r->tokens}, r->q, r->width, r->dk + at,
             r->width, 1);
    multiply(keys, r->width, b->count, (Matrix){r->weights + b->first, 1, r->tokens}, r->own, r->width, r->dv + at,
             r->width, 1);
    float *dq = job->dq + place(job, b), scale = scale_of(job);
    for (int64_t i = 0; i < b->count; i++)
        for (int64_t j = 0; j < job->width; j++) dq[i * apart + j] = r->sums[i * r->width + j] * scale;
}

static void backward(const void *data, int64_t item, float *scratch) {
    const Job *job = data;
    Room r = room(job, scratch);
    int64_t row = item / job->key_heads, key_head = item % job->key_heads, group = job->heads / job->key_heads;
    int64_t apart = job->key_heads * job->width, from = (row * job->tokens * job->key_heads + key_head) * job->width;
    find_begins(job, row, r.begins);
    copy_across(job->k + from, apart, job->tokens, r.tokens, job->width, r.across);
    copy_along(job->k + from, apart, job->tokens, r.tokens, job->width, r.width, 1, r.along);
    copy_across(job->v + from, apart, job->tokens, r.tokens, job->width, r.more_across);
    memset(r.dk, 0, 2 * sizeof(float) * r.tokens * r.width); /* and dv, which follows it */
    for (int64_t head = key_head * group; head < (key_head + 1) * group; head++)
        for (int64_t lo = 0; lo < job->tokens; lo += QUERIES) {
            Block b = block_at(job, &r, row, head, lo);
            backward_block(job, &r, &b);
        }
    for (int64_t i = 0; i < job->tokens; i++)
        for (int64_t j = 0; j < job->width; j++) {
            job->dk[from + i * apart + j] = r.dk[i * r.width + j];
            job->dv[from + i * apart + j] = r.dv[i * r.width + j];
        }
}

static int same(const XLA_FFI_Buffer *x, const XLA_FFI_Buffer *y) {
    return x->rank == y->rank && memcmp(x->dims, y->dims, sizeof(int64_t) * x->rank) == 0;
}

/* Checks what both directions are given: q, k, v, segments, and for the way back stats and dout. */
static const char *fill(Job *job, const XLA_FFI_CallFrame *frame, int64_t arguments, int64_t results) {
    if (frame->args.size != arguments || frame->rets.size != results) return "attention: wrong number of arguments";
    XLA_FFI_Buffer **in = (XLA_FFI_Buffer **)frame->args.args, **out = (XLA_FFI_Buffer **)frame->rets.rets;
    for (int64_t i = 0; i < arguments; i++)
        if (in[i]->dtype != (i == 3 ? XLA_FFI_DataType_S32 : XLA_FFI_DataType_F32))
            return "attention: float32 and int32 segments are needed";
    if (in[0]->rank != 4 || in[1]->rank != 4 || in[3]->rank != 2) return "attention: wrong number of axes";
    const int64_t *q = in[0]->dims, *k = in[1]->dims;
    int fit = q[0] == k[0] && q[1] == k[1] && q[3] == k[3] && q[3] > 0 && k[2] > 0 && q[2] % k[2] == 0 &&
              same(in[1], in[2]) && in[3]->dims[0] == q[0] && in[3]->dims[1] == q[1] && same(in[0], out[0]);
    int back = arguments == 6;
    if (back) fit = fit && same(in[0], in[5]) && same(in[1], out[1]) && same(in[1], out[2]);
    const XLA_FFI_Buffer *stats = back ? in[4] : out[1];
    fit = fit && stats->rank == 4 && stats->dims[0] == q[0] && stats->dims[1] == q[2] && stats->dims[2] == q[1] &&
          stats->dims[3] == 2;
    if (!fit) return "attention: shapes do not go together";
    *job = (Job){.q = in[0]->data, .k = in[1]->data, .v = in[2]->data, .segments = in[3]->data, .rows = q[0],
                 .tokens = q[1], .heads = q[2], .key_heads = k[2], .width = q[3]};
    if (back) {
        job->stats = in[4]->data, job->dout = in[5]->data;
        job->dq = out[0]->data, job->dk = out[1]->data, job->dv = out[2]->data;
    } else {
        job->out = out[0]->data, job->made = out[1]->data;
    }
    return NULL;
}

static XLA_FFI_Error *run(const XLA_FFI_CallFrame *frame, Item *item, int64_t arguments, int64_t results) {
    if (nothing_to_compute(frame)) return NULL;
    Job job;
    const char *wrong = fill(&job, frame, arguments, results);
    if (wrong) return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, wrong);
    int64_t cost = job.rows * job.heads * job.tokens * job.tokens * job.width;
    return done_by_all(frame, &job, sizeof(Job), item, job.rows * job.key_heads, room_floats(&job),
                       1 + cost / COST_FOR_A_THREAD);
}

XLA_FFI_Error *rstar2_attention_forward(XLA_FFI_CallFrame *frame) { return run(frame, forward, 4, 2); }

XLA_FFI_Error *rstar2_attention_backward(XLA_FFI_CallFrame *frame) { return run(frame, backward, 6, 3); }
