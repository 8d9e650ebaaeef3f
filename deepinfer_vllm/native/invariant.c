/* Operations of which each output is computed from its own row's numbers in an order that widths alone decide: not how
 * many rows there are, not where a row stands, not which thread takes it. Compiled without contraction of a * b + c;
 * where that is one operation it says fma. See the functions of the same names in Python for shapes. */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && __GNUC__ >= 12
#define FOR_THIS_CPU __attribute__((target_clones("arch=x86-64-v3", "default")))
#elif defined(__x86_64__) /* older compilers cannot ask for a level, nor clang for one with fma */
#define FOR_THIS_CPU __attribute__((target_clones("fma", "default")))
#else
#define FOR_THIS_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 8, TILE_ROWS = 4, TILE_OUTPUTS = 3, TILE = TILE_ROWS * TILE_OUTPUTS, ROW_OUTPUTS = 8, BLOCK_VALUES = 1 << 14, PARALLEL_VALUES = 1 << 16, HEADS = 32 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

typedef float lanes __attribute__((vector_size(4 * LANES)));

INLINE lanes load(const float *p)
{
    lanes a;
    memcpy(&a, p, sizeof a);
    return a;
}

INLINE lanes load_some(const float *p, long count)
{
    lanes a = {0};
    memcpy(&a, p, count * sizeof *p);
    return a;
}

INLINE lanes fma_lanes(lanes a, lanes b, lanes c)
{
    lanes out;
    for (int i = 0; i < LANES; i++)
        out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
}

INLINE float total(lanes a)
{
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

/* The one order of every inner product here: lane i adds up the products i, i + 8, i + 16, ... in turn; then the lanes
 * are added as `total` has it. A tile is several inner products at once. */
INLINE void tile(const float *x, const float *w, float *out, long n, long k, int rows, int outputs)
{
    lanes sums[TILE] = {{0}};
    long i = 0;
    for (; i + LANES <= k; i += LANES)
        for (int t = 0; t < rows; t++)
            for (int j = 0; j < outputs; j++)
                sums[t * outputs + j] =
                    fma_lanes(load(x + t * k + i), load(w + j * k + i), sums[t * outputs + j]);
    if (i < k)
        for (int t = 0; t < rows; t++)
            for (int j = 0; j < outputs; j++)
                sums[t * outputs + j] = fma_lanes(load_some(x + t * k + i, k - i), load_some(w + j * k + i, k - i),
                                                  sums[t * outputs + j]);
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < outputs; j++)
            out[t * n + j] = total(sums[t * outputs + j]);
}

/* out [rows, n] with its first `outputs` columns written: x [rows, k] times the transpose of w [outputs, k]. */
FOR_THIS_CPU
static void products(const float *x, const float *w, float *out, long rows, long outputs, long n, long k)
{
    long t = 0;
    for (; t + TILE_ROWS <= rows; t += TILE_ROWS) {
        long j = 0;
        for (; j + TILE_OUTPUTS <= outputs; j += TILE_OUTPUTS)
            tile(x + t * k, w + j * k, out + t * n + j, n, k, TILE_ROWS, TILE_OUTPUTS);
        for (; j < outputs; j++)
            tile(x + t * k, w + j * k, out + t * n + j, n, k, TILE_ROWS, 1);
    }
    for (; t < rows; t++) {
        long j = 0;
        for (; j + ROW_OUTPUTS <= outputs; j += ROW_OUTPUTS)
            tile(x + t * k, w + j * k, out + t * n + j, n, k, 1, ROW_OUTPUTS);
        for (; j < outputs; j++)
            tile(x + t * k, w + j * k, out + t * n + j, n, k, 1, 1);
    }
}

FOR_THIS_CPU
static void widen(const void *from, float *to, long count, long kind)
{
    if (kind == FLOAT32) {
        memcpy(to, from, count * sizeof *to);
        return;
    }
    const uint16_t *narrow = from;
    uint32_t *bits = (uint32_t *)to;
    if (kind == BFLOAT16) {
        for (long i = 0; i < count; i++)
            bits[i] = (uint32_t)narrow[i] << 16;
        return;
    }
    for (long i = 0; i < count; i++) {
        uint32_t half = narrow[i], special = (half & 0x7C00) == 0x7C00 ? 0x7F800000 : 0, value = (half & 0x7FFF) << 13;
        float size;
        memcpy(&size, &value, sizeof size);
        size *= 0x1p112f; /* the exponent's other bias; exact */
        memcpy(&value, &size, sizeof size);
        bits[i] = value | special | (half & 0x8000) << 16;
    }
}

static long item_bytes(long kind)
{
    return kind == FLOAT32 ? 4 : 2;
}

/* Columns low..high of a product, a block of weights at a time that stays in a cache while all rows use it. */
static void columns(const float *x, const char *w, float *out, long rows, long low, long high, long n, long k, long kind)
{
    long block = BLOCK_VALUES / (k ? k : 1);
    block = block < 8 * TILE_OUTPUTS ? 8 * TILE_OUTPUTS : block;
    float *wide = kind == FLOAT32 ? NULL : malloc(block * k * sizeof *wide);
    for (long j = low; j < high; j += block) {
        long count = high - j < block ? high - j : block;
        const char *from = w + j * k * item_bytes(kind);
        if (wide)
            widen(from, wide, count * k, kind);
        products(x, wide ? wide : (const float *)from, out + j, rows, count, n, k);
    }
    free(wide);
}

void linear(const float *x, const void *w, float *out, long rows, long n, long k, long kind)
{
#pragma omp parallel if (rows * n * k >= PARALLEL_VALUES)
    {
        long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        if (rows > n) {
            long low = rows * thread / threads, high = rows * (thread + 1) / threads;
            columns(x + low * k, w, out + low * n, high - low, 0, n, n, k, kind);
        } else
            columns(x, w, out, rows, n * thread / threads, n * (thread + 1) / threads, n, k, kind);
    }
}

FOR_THIS_CPU
static float dot(const float *a, const float *b, long k)
{
    float out;
    tile(a, b, &out, 1, k, 1, 1);
    return out;
}

void dots(const float *a, const float *b, float *out, long rows, long k)
{
#pragma omp parallel for if (rows * k >= PARALLEL_VALUES)
    for (long t = 0; t < rows; t++)
        out[t] = dot(a + t * k, b + t * k, k);
}

void normalise(const float *x, float *out, long rows, long k, float eps)
{
#pragma omp parallel for if (rows * k >= PARALLEL_VALUES)
    for (long t = 0; t < rows; t++) {
        float factor = 1 / sqrtf(dot(x + t * k, x + t * k, k) / k + eps);
        for (long i = 0; i < k; i++)
            out[t * k + i] = x[t * k + i] * factor;
    }
}

/* Weights over `count` scores and a sink, in place. */
static void softmax_with_sink(float *scores, long count, float scale, float sink)
{
    float most = sink, sum = 0;
    for (long i = 0; i < count; i++) {
        scores[i] *= scale;
        most = scores[i] > most ? scores[i] : most;
    }
    for (long i = 0; i < count; i++)
        sum += scores[i] = expf(scores[i] - most);
    sum += expf(sink - most);
    for (long i = 0; i < count; i++)
        scores[i] /= sum;
}

INLINE void mixed_tile(const float *weights, const float *values, float *out, long count, long dim, int rows, int wide)
{
    lanes sums[TILE_ROWS][TILE_OUTPUTS] = {{{0}}};
    for (long i = 0; i < count; i++)
        for (int t = 0; t < rows; t++) {
            lanes weight = (lanes){0} + weights[t * count + i];
            for (int j = 0; j < wide; j++)
                sums[t][j] = fma_lanes(weight, load(values + i * dim + j * LANES), sums[t][j]);
        }
    for (int t = 0; t < rows; t++)
        for (int j = 0; j < wide; j++)
            memcpy(out + t * dim + j * LANES, &sums[t][j], sizeof(lanes));
}

/* out [rows, dim] = weights [rows, count] times values [count, dim], added up from the first value to the last. */
FOR_THIS_CPU
static void mixed(const float *weights, const float *values, float *out, long rows, long count, long dim)
{
    enum { STEP = LANES * TILE_OUTPUTS };
    for (long t = 0; t < rows; t++) {
        int whole = t + TILE_ROWS <= rows;
        const float *own = weights + t * count;
        float *to = out + t * dim;
        long d = 0;
        for (; d + STEP <= dim; d += STEP)
            if (whole)
                mixed_tile(own, values + d, to + d, count, dim, TILE_ROWS, TILE_OUTPUTS);
            else
                mixed_tile(own, values + d, to + d, count, dim, 1, TILE_OUTPUTS);
        for (; d + LANES <= dim; d += LANES)
            if (whole)
                mixed_tile(own, values + d, to + d, count, dim, TILE_ROWS, 1);
            else
                mixed_tile(own, values + d, to + d, count, dim, 1, 1);
        for (; d < dim; d++)
            for (long r = 0; r < (whole ? TILE_ROWS : 1); r++) {
                float sum = 0;
                for (long i = 0; i < count; i++)
                    sum = __builtin_fmaf(own[r * count + i], values[i * dim + d], sum);
                to[r * dim + d] = sum;
            }
        t += whole ? TILE_ROWS - 1 : 0;
    }
}

static long gather(const char *rows, long row_bytes, const int64_t *slots, long count, long dim, long kind, float *to)
{
    long found = 0;
    for (long i = 0; i < count; i++)
        if (slots[i] >= 0)
            widen(rows + slots[i] * row_bytes, to + found++ * dim, dim, kind);
    return found;
}

void attention(const float *query, const char *window, long window_bytes, const int64_t *window_slots, long in_window,
               const char *rows, long row_bytes, const int64_t *row_slots, long selected, long kind, const float *sink,
               float scale, float *out, long tokens, long heads, long dim)
{
    long groups = (heads + HEADS - 1) / HEADS;
#pragma omp parallel if (tokens * heads * dim * (in_window + selected) >= PARALLEL_VALUES)
    {
        float *values = malloc((in_window + selected) * dim * sizeof *values);
        float *scores = malloc((in_window + selected) * HEADS * sizeof *scores);
        long held = -1, count = 0; /* the token whose rows are gathered */
#pragma omp for schedule(static)
        for (long unit = 0; unit < tokens * groups; unit++) {
            long t = unit / groups, head = unit % groups * HEADS, some = heads - head < HEADS ? heads - head : HEADS;
            if (t != held) {
                count = gather(window, window_bytes, window_slots + t * in_window, in_window, dim, kind, values);
                count += gather(rows, row_bytes, row_slots + t * selected, selected, dim, kind, values + count * dim);
                held = t;
            }
            const float *own = query + (t * heads + head) * dim;
            products(own, values, scores, some, count, count, dim);
            for (long h = 0; h < some; h++)
                softmax_with_sink(scores + h * count, count, scale, sink[head + h]);
            mixed(scores, values, out + (t * heads + head) * dim, some, count, dim);
        }
        free(values);
        free(scores);
    }
}

FOR_THIS_CPU
static void add_heads(const float *products, const float *weight, float *out, long heads, long count)
{
    memset(out, 0, count * sizeof *out);
    for (long h = 0; h < heads; h++)
        for (long g = 0; g < count; g++) {
            float p = products[h * count + g];
            out[g] = __builtin_fmaf(weight[h], p > 0 ? p : 0, out[g]);
        }
}

void head_scores(const float *query, const float *weight, const float *keys, const int64_t *owner, float *out,
                 long tokens, long heads, long rows, long dim)
{
    enum { SOME = 64 };
#pragma omp parallel if (tokens * heads * rows * dim >= PARALLEL_VALUES)
    {
        float *all = malloc(heads * SOME * sizeof *all);
        long blocks = (rows + SOME - 1) / SOME;
#pragma omp for schedule(static)
        for (long unit = 0; unit < blocks * tokens; unit++) {
            long t = unit % tokens, low = unit / tokens * SOME, count = rows - low < SOME ? rows - low : SOME;
            products(query + t * heads * dim, keys + (owner[t] * rows + low) * dim, all, heads, count, count, dim);
            add_heads(all, weight + t * heads, out + t * rows + low, heads, count);
        }
        free(all);
    }
}

static float sigmoid_of(float x)
{
    return 1 / (1 + expf(-x));
}

void sigmoid(const float *x, float *out, long count)
{
    for (long i = 0; i < count; i++)
        out[i] = sigmoid_of(x[i]);
}

void sqrt_softplus(const float *x, float *out, long count)
{
    for (long i = 0; i < count; i++)
        out[i] = sqrtf(x[i] > 20 ? x[i] : log1pf(expf(x[i])));
}

void softmax(const float *x, float *out, long rows, long k)
{
    for (long t = 0; t < rows; t++) {
        memcpy(out + t * k, x + t * k, k * sizeof *out);
        softmax_with_sink(out + t * k, k, 1, -INFINITY);
    }
}

void swiglu(const float *gate, long gate_width, const float *up, long up_width, float *out, long rows, long k, float limit)
{
#pragma omp parallel for if (rows * k >= PARALLEL_VALUES)
    for (long t = 0; t < rows; t++)
        for (long i = 0; i < k; i++) {
            float g = gate[t * gate_width + i], u = up[t * up_width + i];
            if (limit > 0) {
                g = g > limit ? limit : g;
                u = u > limit ? limit : u < -limit ? -limit : u;
            }
            out[t * k + i] = g / (1 + expf(-g)) * u;
        }
}

void pool(const float *members, float *out, long groups, long ratio, long dim)
{
    for (long g = 0; g < groups; g++, members += ratio * 2 * dim)
        for (long d = 0; d < dim; d++) {
            const float *value = members + d, *score = value + dim;
            float most = score[0], sum = 0, mean = 0;
            for (long i = 1; i < ratio; i++)
                most = score[i * 2 * dim] > most ? score[i * 2 * dim] : most;
            for (long i = 0; i < ratio; i++) {
                float weight = expf(score[i * 2 * dim] - most);
                sum += weight;
                mean = __builtin_fmaf(weight, value[i * 2 * dim], mean);
            }
            out[g * dim + d] = mean / sum;
        }
}

void hyper_gates(const float *mixes, const float *squares, const float *base, const float *scale, float *pre, float *post,
                 float *comb, long tokens, long m, float width, float eps, float norm_eps)
{
    for (long t = 0; t < tokens; t++, mixes += (2 + m) * m) {
        float factor = 1 / sqrtf(squares[t] / width + norm_eps);
        for (long i = 0; i < m; i++) {
            pre[t * m + i] = sigmoid_of(mixes[i] * factor * scale[0] + base[i]) + eps;
            post[t * m + i] = 2 * sigmoid_of(mixes[m + i] * factor * scale[1] + base[m + i]);
        }
        for (long i = 0; i < m * m; i++)
            comb[t * m * m + i] = mixes[2 * m + i] * factor * scale[2] + base[2 * m + i];
    }
}

void collapse(const float *streams, const float *pre, float *out, long tokens, long m, long dim)
{
#pragma omp parallel for if (tokens * m * dim >= PARALLEL_VALUES)
    for (long t = 0; t < tokens; t++)
        for (long d = 0; d < dim; d++) {
            float sum = 0;
            for (long i = 0; i < m; i++)
                sum = sum + pre[t * m + i] * streams[(t * m + i) * dim + d];
            out[t * dim + d] = sum;
        }
}

void expand(const float *y, const float *streams, const float *post, const float *comb, float *out, long tokens, long m,
            long dim)
{
#pragma omp parallel for if (tokens * m * dim >= PARALLEL_VALUES)
    for (long t = 0; t < tokens; t++)
        for (long j = 0; j < m; j++)
            for (long d = 0; d < dim; d++) {
                float sum = post[t * m + j] * y[t * dim + d];
                for (long i = 0; i < m; i++)
                    sum = sum + comb[(t * m + i) * m + j] * streams[(t * m + i) * dim + d];
                out[(t * m + j) * dim + d] = sum;
            }
}

void rotary(const int64_t *positions, const float *frequencies, float *cosines, float *sines, long tokens, long pairs)
{
#pragma omp parallel for if (tokens * pairs >= PARALLEL_VALUES / 16)
    for (long t = 0; t < tokens; t++)
        for (long i = 0; i < pairs; i++) {
            float angle = (float)positions[t] * frequencies[i];
            long at = 2 * (t * pairs + i);
            cosines[at] = cosines[at + 1] = cosf(angle);
            sines[at + 1] = sinf(angle);
            sines[at] = -sines[at + 1];
        }
}

void rotate(const float *x, const float *cosines, const float *sines, float *out, long tokens, long heads, long width,
            long dim, float sign)
{
#pragma omp parallel for if (tokens * heads * width >= PARALLEL_VALUES)
    for (long unit = 0; unit < tokens * heads; unit++) {
        const float *from = x + unit * width, *c = cosines + unit / heads * dim, *s = sines + unit / heads * dim;
        float *to = out + unit * width;
        memcpy(to, from, (width - dim) * sizeof *to);
        from += width - dim, to += width - dim;
        for (long i = 0; i < dim; i += 2) {
            to[i] = from[i] * c[i] + from[i + 1] * (sign * s[i]);
            to[i + 1] = from[i + 1] * c[i + 1] + from[i] * (sign * s[i + 1]);
        }
    }
}

void engram_gates(const float *weighted, const float *squares, const float *key_squares, float *out, long count,
                  float width, float eps, float least)
{
    for (long i = 0; i < count; i++) {
        float norms = 1 / sqrtf(squares[i] / width + eps) * (1 / sqrtf(key_squares[i] / width + eps));
        float dot = weighted[i] * norms / sqrtf(width), size = fabsf(dot);
        out[i] = sigmoid_of(copysignf(sqrtf(size > least ? size : least), dot));
    }
}
