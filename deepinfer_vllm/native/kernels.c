/* See the functions of the same names in Python for what is computed; the order of operations is theirs. */

#include <math.h>

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
