/* The little of the CUDA driver that torch calls by name: one context a device, always there. */
#include "fake.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#undef cuMemGetAddressRange /* cuda.h names a newer one; torch asks for this */

CUresult cuInit(unsigned flags) { (void)flags; return fake_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
CUresult cuDeviceGetCount(int *n) { *n = fake_devices(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *d, int index) { *d = index; return index < fake_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
CUresult cuDeviceGetUuid(CUuuid *id, CUdevice d) { memset(id, 0, sizeof *id); id->bytes[15] = (char)fake_physical(d); return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) {
  switch ((int)a) { /* what the runtime has no number for: virtual memory, multicast, fabric are not here */
  case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
  case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: *v = 0; return CUDA_SUCCESS;
  default: return cudaDeviceGetAttribute(v, (enum cudaDeviceAttr)a, d) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
}
CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *flags, int *active) { (void)d; if (flags) *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)(uintptr_t)(d + 1); return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)(uintptr_t)(fake_device() + 1); return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext c) { return cudaSetDevice((int)(uintptr_t)c - 1) == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE; }
CUresult cuLogsRegisterCallback(CUlogsCallback call, void *given, CUlogsCallbackHandle *handle) { /* since torch 2.15 */
  (void)call, (void)given;
  *handle = NULL; /* nothing is ever logged */
  return CUDA_SUCCESS;
}
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) { (void)handle; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char **text) { (void)e; *text = "an error of the fake driver"; return CUDA_SUCCESS; }
CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr p) {
  region r = fake_region((void *)(uintptr_t)p);
  if (r.kind == UNKNOWN) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = r.low;
  if (bytes) *bytes = r.high - r.low;
  return CUDA_SUCCESS;
}
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute a, CUdeviceptr p) {
  region r = fake_region((void *)(uintptr_t)p);
  if (r.kind == UNKNOWN) return CUDA_ERROR_INVALID_VALUE;
  switch ((int)a) {
  case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = r.device; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = r.kind == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; return CUDA_SUCCESS;
  case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = p; return CUDA_SUCCESS;
  default: fake_die("cuPointerGetAttribute: attribute %d has no value here", (int)a);
  }
}
