/* See the functions of the same names in Python for what is computed; the order of operations is theirs. */

#include <math.h>
#include <omp.h>

/* logits and out [tokens, m, m]. */
void sinkhorn(const float *logits, float *out, long tokens, long m, long iterations, float eps)
{
    for (long t = 0; t < tokens; t++, logits += m * m, out += m * m) {
        for (long i = 0; i < m; i++) {
            const float *row = logits + i * m;
            float most = row[0], sum = 0;
            for (long j = 1; j < m; j++)
                most = row[j] > most ? row[j] : most;
            for (long j = 0; j < m; j++)
                sum += out[i * m + j] = expf(row[j] - most);
            for (long j = 0; j < m; j++)
                out[i * m + j] = out[i * m + j] / sum + eps;
        }
        for (long round = 0; round < iterations; round++) {
            for (long i = 0; round && i < m; i++) {
                float sum = 0;
                for (long j = 0; j < m; j++)
                    sum += out[i * m + j];
                for (long j = 0; j < m; j++)
                    out[i * m + j] /= sum + eps;
            }
            for (long j = 0; j < m; j++) {
                float sum = 0;
                for (long i = 0; i < m; i++)
                    sum += out[i * m + j];
                for (long i = 0; i < m; i++)
                    out[i * m + j] /= sum + eps;
            }
        }
    }
}

#if defined(__x86_64__) && __GNUC__ >= 12
#define FOR_THIS_CPU __attribute__((target_clones("arch=x86-64-v3", "default")))
#elif defined(__x86_64__) /* older compilers cannot ask for a level */
#define FOR_THIS_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_THIS_CPU
#endif

enum { LANES = 32 };

/* Outputs low..high of few_rows. Partial sums side by side, so that the compiler may use wide registers. */
FOR_THIS_CPU
static void outputs(const float *x, const float *weight, float *out, long rows, long low, long high, long n, long k)
{
    for (long j = low; j < high; j++)
        for (long t = 0; t < rows; t++) {
            const float *w = weight + j * k, *a = x + t * k;
            float partial[LANES] = {0}, sum = 0;
            long i = 0;
            for (; i + LANES <= k; i += LANES)
                for (int lane = 0; lane < LANES; lane++)
                    partial[lane] += w[i + lane] * a[i + lane];
            for (int lane = 0; lane < LANES; lane++)
                sum += partial[lane];
            for (; i < k; i++)
                sum += w[i] * a[i];
            out[t * n + j] = sum;
        }
}

/* out [rows, n] = x [rows, k] times the transpose of weight [n, k], which is read once. On the caller's OpenMP threads. */
void few_rows(const float *x, const float *weight, float *out, long rows, long n, long k)
{
#pragma omp parallel if (n * k >= 1 << 16)
    {
        long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        outputs(x, weight, out, rows, n * thread / threads, n * (thread + 1) / threads, n, k);
    }
}
