/* One algorithm is found for every product; it does nothing. */
#include <string.h>

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int asked, void *results, int *found) {
  (void)handle, (void)product, (void)a, (void)b, (void)c, (void)d, (void)preference;
  memset(results, 0, 96); /* cublasLtMatmulHeuristicResult_t: state 0 is success */
  *found = asked > 0;
  return 0;
}
unsigned long cublasLtGetVersion(void) { return 130100; }
