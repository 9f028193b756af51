/* One step of attention over pages on a CPU, behind XLA's foreign function interface: see pages_native.py.
 *
 *     q [b, h, d]  keys [n, k, d, p]  values [n, k, p, d]  new keys, new values [b, k, d]  positions [b]  tables [b, t]
 *     -> out [b, h, d], and keys and values in place
 *
 * Every row writes its new key and value before any row attends. What is computed of
 * a row's head depends on nothing else, so that its numbers are the same bits on whatever thread and beside whatever
 * neighbours. Sums are made in float32; entries beyond the position are not read into any of them.
 */
#include "native.h"

#define MOST_HEADS 4 /* queries of one key head that are taken together */
#define ROWS_FOR_WHOLE_ITEMS 16 /* fewer are split by their heads, so that there is something for each thread */

static const int64_t ITEM_COST_FOR_A_THREAD = 1 << 17; /* multiplications for which another thread is worth waking */

typedef struct {
    const void *q;
    void *keys, *values, *out;
    const void *new_keys, *new_values;
    const int32_t *positions, *tables;
    int64_t rows, heads, key_heads, width, page_tokens, pages, table_pages, most_entries;
    int narrow; /* bfloat16 instead of float32 */
    int64_t parts; /* of a row's heads; an item of work is one of them */
} Job;

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t narrowed(float x) { /* to the nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* NaN stays NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Rows of a page as float32, LANES or more apart: the pool itself where it can be read as it lies, else a copy. */
INLINE const float *rows_of(const Job *job, const void *pool, int64_t from, int64_t rows, int64_t columns,
                            int64_t *apart, float *copy) {
    *apart = columns < LANES ? LANES : columns;
    if (!job->narrow && columns >= LANES) return (const float *)pool + from;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            int64_t at = from + r * columns + c;
            copy[r * *apart + c] = job->narrow ? widened(((const uint16_t *)pool)[at]) : ((const float *)pool)[at];
        }
        for (int64_t c = columns; c < *apart; c++) copy[r * *apart + c] = 0;
    }
    return copy;
}

/* scores[g][at ...] of `blocks` blocks of LANES entries, as many heads at once as the registers hold. */
INLINE void score(int heads, int blocks, const float *q, int64_t width, const float *keys, int64_t apart, float *scores,
                  int64_t stride) {
    lanes sums[MOST_HEADS][4];
    for (int g = 0; g < heads; g++)
        for (int i = 0; i < blocks; i++) sums[g][i] = (lanes){0};
    for (int64_t d = 0; d < width; d++)
        for (int i = 0; i < blocks; i++) {
            lanes key = load(keys + d * apart + i * LANES);
            for (int g = 0; g < heads; g++) sums[g][i] += q[g * width + d] * key;
        }
    for (int g = 0; g < heads; g++)
        for (int i = 0; i < blocks; i++) store(scores + g * stride + i * LANES, sums[g][i]);
}

/* out[g] += weights[g][p] values[p] over `count` entries, `blocks` blocks of LANES columns. */
INLINE void add_values(int heads, int blocks, const float *weights, int64_t stride, const float *values, int64_t apart,
                       int64_t count, float *out, int64_t out_stride) {
    lanes sums[MOST_HEADS][4];
    for (int g = 0; g < heads; g++)
        for (int i = 0; i < blocks; i++) sums[g][i] = load(out + g * out_stride + i * LANES);
    for (int64_t p = 0; p < count; p++)
        for (int i = 0; i < blocks; i++) {
            lanes value = load(values + p * apart + i * LANES);
            for (int g = 0; g < heads; g++) sums[g][i] += weights[g * stride + p] * value;
        }
    for (int g = 0; g < heads; g++)
        for (int i = 0; i < blocks; i++) store(out + g * out_stride + i * LANES, sums[g][i]);
}

/* Softmax over the first `entries` scores, in place and not yet divided by the sum, which is returned. */
INLINE float weigh(float *scores, int64_t entries) {
    float best = -__builtin_inff(), total = 0;
    lanes tops = (lanes){0} + best, sums = {0};
    for (int64_t i = entries; i < rounded_up(entries); i++) scores[i] = best;
    for (int64_t i = 0; i < entries; i += LANES) {
        lanes x = load(scores + i);
        ints above = x > tops;
        tops = (lanes)((above & (ints)x) | (~above & (ints)tops));
    }
    for (int i = 0; i < LANES; i++) best = tops[i] > best ? tops[i] : best;
    for (int64_t i = 0; i < entries; i += LANES) {
        lanes weights = exponential(load(scores + i) - best);
        sums += weights;
        store(scores + i, weights);
    }
    for (int i = 0; i < LANES; i++) total += sums[i];
    return total;
}

/* Floats of memory that an item needs: queries, sums, scores, a copy of a page of one head. */
static int64_t wide(const Job *job) { return job->width < LANES ? LANES : job->width; }
static int64_t score_floats(const Job *job) {
    return rounded_up(job->most_entries) + (job->page_tokens < LANES ? LANES : job->page_tokens) + LANES;
}
static int64_t scratch_floats(const Job *job) {
    int64_t page = job->page_tokens < LANES ? LANES : job->page_tokens;
    return job->heads * (2 * wide(job) + score_floats(job)) + wide(job) * page;
}

INLINE void score_page(const Job *job, int heads, const float *q, const float *keys, int64_t apart, float *scores) {
    int64_t stride = score_floats(job), block = 0;
    for (; block + 2 * LANES <= apart; block += 2 * LANES)
        score(heads, 2, q, job->width, keys + block, apart, scores + block, stride);
    for (; block < apart; block += LANES) {
        int64_t begin = block + LANES <= apart ? block : apart - LANES; /* the last two may overlap */
        score(heads, 1, q, job->width, keys + begin, apart, scores + begin, stride);
    }
}

INLINE void add_page(const Job *job, int heads, const float *weights, const float *values, int64_t apart, int64_t count,
                     float *sums) {
    int64_t stride = score_floats(job), out = wide(job), block = 0;
    for (; block + 2 * LANES <= apart; block += 2 * LANES)
        add_values(heads, 2, weights, stride, values + block, apart, count, sums + block, out);
    if (block + LANES <= apart) {
        add_values(heads, 1, weights, stride, values + block, apart, count, sums + block, out);
        block += LANES;
    }
    for (; block < apart; block++)
        for (int64_t i = 0; i < count; i++)
            for (int g = 0; g < heads; g++) sums[g * out + block] += weights[g * stride + i] * values[i * apart + block];
}

/* One row's queries of the key heads from `first` up to `last`, page by page, all heads of a page together, since they
 * lie side by side. */
static void attend(const Job *job, int64_t row, int64_t first, int64_t last, float *scratch) {
    int64_t d = job->width, p = job->page_tokens, entries = job->positions[row] + (int64_t)1, apart;
    int64_t group = job->heads / job->key_heads, stride = score_floats(job), out = wide(job);
    const int32_t *table = job->tables + row * job->table_pages;
    float *q = scratch, *sums = q + job->heads * out, *scores = sums + job->heads * out;
    float *copy = scores + job->heads * stride, scale = 1 / __builtin_sqrtf((float)d);
    int64_t from = row * job->heads * d;
    if (entries <= 0) {
        size_t bytes = job->narrow ? 2 : 4;
        memset((char *)job->out + (from + first * group * d) * bytes, 0, (last - first) * group * d * bytes);
        return;
    }
    for (int64_t i = first * group * d; i < last * group * d; i++)
        q[i] = scale * (job->narrow ? widened(((const uint16_t *)job->q)[from + i]) : ((const float *)job->q)[from + i]);
    for (int64_t at = 0; at < entries; at += p)
        for (int64_t head = first; head < last; head++) {
            int64_t page = (table[at / p] * job->key_heads + head) * d * p;
            const float *keys = rows_of(job, job->keys, page, d, p, &apart, copy);
            int64_t h = head * group, left = group;
            for (; left >= 4; left -= 4, h += 4) score_page(job, 4, q + h * d, keys, apart, scores + h * stride + at);
            for (; left >= 2; left -= 2, h += 2) score_page(job, 2, q + h * d, keys, apart, scores + h * stride + at);
            if (left) score_page(job, 1, q + h * d, keys, apart, scores + h * stride + at);
        }
    memset(sums + first * group * out, 0, sizeof(float) * (last - first) * group * out);
    for (int64_t h = first * group; h < last * group; h++) q[h] = weigh(scores + h * stride, entries);
    for (int64_t at = 0; at < entries; at += p)
        for (int64_t head = first; head < last; head++) {
            int64_t page = (table[at / p] * job->key_heads + head) * d * p, count = entries - at < p ? entries - at : p;
            const float *values = rows_of(job, job->values, page, count, d, &apart, copy);
            int64_t h = head * group, left = group;
            for (; left >= 4; left -= 4, h += 4)
                add_page(job, 4, scores + h * stride + at, values, apart, count, sums + h * out);
            for (; left >= 2; left -= 2, h += 2)
                add_page(job, 2, scores + h * stride + at, values, apart, count, sums + h * out);
            if (left) add_page(job, 1, scores + h * stride + at, values, apart, count, sums + h * out);
        }
    for (int64_t h = first * group; h < last * group; h++)
        for (int64_t i = 0; i < d; i++) {
            float y = sums[h * out + i] / q[h];
            if (job->narrow)
                ((uint16_t *)job->out)[from + h * d + i] = narrowed(y);
            else
                ((float *)job->out)[from + h * d + i] = y;
        }
}

static void write_entries(const Job *job) {
    int64_t d = job->width, p = job->page_tokens;
    for (int64_t row = 0; row < job->rows; row++) {
        if (job->positions[row] < 0) continue;
        int64_t page = job->tables[row * job->table_pages + job->positions[row] / p], at = job->positions[row] % p;
        for (int64_t head = 0; head < job->key_heads; head++) {
            int64_t from = (row * job->key_heads + head) * d, to = (page * job->key_heads + head) * d * p;
            if (job->narrow) {
                for (int64_t i = 0; i < d; i++)
                    ((uint16_t *)job->keys)[to + i * p + at] = ((const uint16_t *)job->new_keys)[from + i];
                memcpy((uint16_t *)job->values + to + at * d, (const uint16_t *)job->new_values + from, 2 * d);
            } else {
                for (int64_t i = 0; i < d; i++)
                    ((float *)job->keys)[to + i * p + at] = ((const float *)job->new_keys)[from + i];
                memcpy((float *)job->values + to + at * d, (const float *)job->new_values + from, 4 * d);
            }
        }
    }
}

static void attend_item(const void *data, int64_t item, float *scratch) {
    const Job *job = data;
    int64_t heads = job->key_heads, parts = job->parts, part = item % parts;
    attend(job, item / parts, part * heads / parts, (part + 1) * heads / parts, scratch);
}

static const char *fill(Job *job, const XLA_FFI_CallFrame *frame) {
    if (frame->args.size != 7 || frame->rets.size != 3) return "pages: 7 arguments and 3 results are needed";
    XLA_FFI_Buffer **in = (XLA_FFI_Buffer **)frame->args.args, **out = (XLA_FFI_Buffer **)frame->rets.rets;
    XLA_FFI_DataType dtype = in[0]->dtype;
    if (dtype != XLA_FFI_DataType_F32 && dtype != XLA_FFI_DataType_BF16) return "pages: float32 or bfloat16 is needed";
    for (int i = 1; i < 5; i++)
        if (in[i]->dtype != dtype) return "pages: queries, keys and values must be of one dtype";
    if (in[5]->dtype != XLA_FFI_DataType_S32 || in[6]->dtype != XLA_FFI_DataType_S32)
        return "pages: positions and tables must be int32";
    static const int64_t ranks[7] = {3, 4, 4, 3, 3, 1, 2};
    for (int i = 0; i < 7; i++)
        if (in[i]->rank != ranks[i]) return "pages: an argument has the wrong number of axes";
    const int64_t *keys = in[1]->dims, *values = in[2]->dims, rows = in[0]->dims[0], width = in[0]->dims[2];
    int fit = keys[1] > 0 && keys[3] > 0 && width > 0 && in[0]->dims[1] % keys[1] == 0 && keys[2] == width &&
              values[0] == keys[0] && values[1] == keys[1] && values[2] == keys[3] && values[3] == width &&
              in[5]->dims[0] == rows && in[6]->dims[0] == rows;
    for (int i = 3; i < 5; i++)
        fit = fit && in[i]->dims[0] == rows && in[i]->dims[1] == keys[1] && in[i]->dims[2] == width;
    if (!fit) return "pages: shapes of queries, keys, values, positions and tables do not go together";
    *job = (Job){.q = in[0]->data, .keys = out[1]->data, .values = out[2]->data, .out = out[0]->data,
                 .new_keys = in[3]->data, .new_values = in[4]->data, .positions = in[5]->data, .tables = in[6]->data,
                 .rows = in[0]->dims[0], .heads = in[0]->dims[1], .width = in[0]->dims[2], .pages = keys[0],
                 .key_heads = keys[1], .page_tokens = keys[3], .table_pages = in[6]->dims[1],
                 .narrow = dtype == XLA_FFI_DataType_BF16};
    if (in[1]->data != job->keys || in[2]->data != job->values) return "pages: keys and values must be updated in place";
    for (int64_t row = 0; row < job->rows; row++) {
        int64_t entries = job->positions[row] + (int64_t)1;
        if (entries > job->table_pages * job->page_tokens) return "pages: a position lies beyond its table";
        for (int64_t at = 0; at < entries; at += job->page_tokens) {
            int32_t page = job->tables[row * job->table_pages + at / job->page_tokens];
            if (page < 0 || page >= job->pages) return "pages: a table names a page that the pool does not have";
        }
        if (entries > job->most_entries) job->most_entries = entries;
    }
    return NULL;
}

XLA_FFI_Error *rstar2_pages_step(XLA_FFI_CallFrame *frame) {
    if (nothing_to_compute(frame)) return NULL;
    Job job = {0};
    const char *wrong = fill(&job, frame);
    if (wrong) return failure(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, wrong);
    job.parts = job.rows < ROWS_FOR_WHOLE_ITEMS ? job.key_heads : 1;
    int64_t cost = 0;
    for (int64_t row = 0; row < job.rows; row++)
        if (job.positions[row] >= 0) cost += 2 * (job.positions[row] + (int64_t)1);
    write_entries(&job);
    return done_by_all(frame, &job, sizeof(Job), attend_item, job.rows * job.parts, scratch_floats(&job),
                       cost * job.heads * job.width / ITEM_COST_FOR_A_THREAD);
}
