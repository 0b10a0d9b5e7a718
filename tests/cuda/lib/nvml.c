/* The part of NVML that names devices, their memory and their places. A function that is not here is missing, as in an
 * old driver: nvidia-ml-py says so to its caller. Devices are counted as on the machine, not as CUDA_VISIBLE_DEVICES has them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int result; /* nvmlReturn_t: 0 success, 2 invalid argument, 3 not supported */
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci;
typedef struct { unsigned long long total, free, used; } memory;

static unsigned all(void) { const char *n = getenv("FAKE_CUDA_DEVICES"); return n && *n ? (unsigned)atoi(n) : 1; }
static const char *gpu(void) { const char *n = getenv("FAKE_CUDA_GPU"); return n && *n ? n : "A100"; }
static unsigned index_of(void *handle) { return (unsigned)(size_t)handle - 1; }

result nvmlInit(void) { return 0; } /* torch counts devices with it */
result nvmlInit_v2(void) { return 0; }
result nvmlInitWithFlags(unsigned flags) { (void)flags; return 0; }
result nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(result r) { return r == 0 ? "Success" : r == 3 ? "Not Supported" : "Invalid Argument"; }
result nvmlDeviceGetCount_v2(unsigned *n) { *n = all(); return 0; }
result nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { if (i >= all()) return 2; *handle = (void *)(size_t)(i + 1); return 0; }
result nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle) {
  unsigned domain, bus;
  if (sscanf(address, "%x:%x:", &domain, &bus) != 2 || bus < 16 || bus - 16 >= all()) return 2;
  *handle = (void *)(size_t)(bus - 16 + 1);
  return 0;
}
result nvmlDeviceGetIndex(void *h, unsigned *i) { *i = index_of(h); return 0; }
result nvmlDeviceGetName(void *h, char *name, unsigned n) {
  (void)h;
  snprintf(name, n, "%s", !strcmp(gpu(), "H100") ? "NVIDIA H100 80GB HBM3" : !strcmp(gpu(), "T4") ? "Tesla T4" : "NVIDIA A100-SXM4-80GB");
  return 0;
}
result nvmlDeviceGetUUID(void *h, char *id, unsigned n) { snprintf(id, n, "GPU-00000000-0000-0000-0000-%012x", index_of(h)); return 0; }
result nvmlDeviceGetPciInfo_v3(void *h, pci *p) {
  memset(p, 0, sizeof *p);
  p->bus = 16 + index_of(h);
  snprintf(p->legacy, sizeof p->legacy, "0000:%02X:00.0", p->bus);
  snprintf(p->address, sizeof p->address, "00000000:%02X:00.0", p->bus);
  return 0;
}
result nvmlDeviceGetMemoryInfo(void *h, memory *m) {
  (void)h;
  const char *mb = getenv("FAKE_CUDA_MEMORY");
  m->total = (mb && *mb ? strtoull(mb, NULL, 10) : !strcmp(gpu(), "T4") ? 15360ull : 81920ull) << 20;
  m->used = 0, m->free = m->total;
  return 0;
}
result nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
  (void)h;
  *major = !strcmp(gpu(), "H100") ? 9 : !strcmp(gpu(), "T4") ? 7 : 8;
  *minor = *major == 7 ? 5 : 0;
  return 0;
}
result nvmlDeviceGetComputeRunningProcesses(void *h, unsigned *count, void *processes) { (void)h, (void)processes; *count = 0; return 0; }
result nvmlSystemGetDriverVersion(char *v, unsigned n) { snprintf(v, n, "580.00"); return 0; }
result nvmlSystemGetCudaDriverVersion_v2(int *v) { *v = 13000; return 0; }
