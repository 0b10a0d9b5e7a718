/* CUPTI, which a profiler of torch 2.11 asks for once a process, of the CPU alone too: it is not supported. */
#include "fake.h"

int cuptiGetResultString(int result, const char **text) {
    *text = "fake CUDA has no CUPTI";
    return 0;
}
