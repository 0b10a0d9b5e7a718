/* What callers read back from BLAS and DNN. All other calls succeed and do nothing: the operator is computed elsewhere. */
#include <string.h>

int cublasCreate_v2(void **handle) { *handle = (void *)8; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
int cublasGetMathMode(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
