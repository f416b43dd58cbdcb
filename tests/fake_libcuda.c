// A CUDA driver that only records: what a launch is made of reaches it, and nothing runs. Tests load it in place of libcuda.so.1.
//
// A tensor map's 128 bytes hold the arguments it was encoded with, so that a launch's parameters have everything.
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  int id;
  char pad[4];
  unsigned value[16];
} attribute;

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  attribute *attributes;
  unsigned count;
} launch_config;

typedef struct {
  uint64_t address, extents[5], strides[4];
  uint16_t box[5];
  uint8_t element_strides[5], data_type, rank, interleave, swizzle, promotion, nan_fill;
} recorded_map;

enum { MAX_PARAMETERS = 64, MAX_FUNCTIONS = 4096, FIRST_FUNCTION = 4096 };

// Set by a test.
int capability_major = 9, capability_minor = 0, multiprocessors = 132, device_count = 1, fail_next_launch = 0;
void *current_context = (void *)8;
unsigned parameter_count, parameter_sizes[MAX_PARAMETERS];

// Read by a test.
unsigned launches, encodings, modules, unloaded, allocations, grid[3], block[3], shared_bytes, cluster;
uint64_t stream, zeroed;
char launched[256];
unsigned char parameters[MAX_PARAMETERS][128];

static char names[MAX_FUNCTIONS][256];
static int shared_limits[MAX_FUNCTIONS];
static uintptr_t functions;

int cuInit(unsigned flags) { return (int)flags; }
int cuGetErrorName(int status, const char **name) {
  *name = status == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_FAKE";
  return 0;
}
int cuDeviceGet(int *device, int index) {
  *device = index;
  return index < device_count ? 0 : 101;
}
int cuDeviceGetAttribute(int *value, int which, int device) {
  (void)device;
  *value = which == 75 ? capability_major : which == 76 ? capability_minor : which == 16 ? multiprocessors : -1;
  return *value < 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  (void)device;
  *context = (void *)8;
  return 0;
}
int cuCtxPushCurrent_v2(void *context) { return context != (void *)8; }
int cuCtxPopCurrent_v2(void **context) {
  *context = 0;
  return 0;
}
int cuCtxGetCurrent(void **context) {
  *context = current_context;
  return 0;
}
int cuCtxGetDevice(int *device) {
  *device = 0;
  return 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  *mode = 0;
  return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  static uint64_t next = 1 << 20;
  *address = next;
  next += (bytes + 4095) / 4096 * 4096;
  allocations++;
  return 0;
}
int cuStreamCreate(void **made, unsigned flags) {
  (void)flags;
  *made = (void *)16;
  return 0;
}
int cuStreamSynchronize(void *which) { return which != (void *)16; }
int cuStreamDestroy_v2(void *which) { return which != (void *)16; }
int cuMemsetD8Async(uint64_t address, unsigned char byte, size_t bytes, void *which) {
  (void)address;
  (void)which;
  zeroed += bytes;
  return byte;
}
int cuModuleLoadData(void **module, const void *image) {
  modules++;
  *module = (void *)24;
  return image == 0;
}
int cuModuleUnload(void *module) {
  unloaded++;
  return module != (void *)24;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  // Later tests in one process begin again, long before the first ones' functions would be used.
  uintptr_t index = functions++ % MAX_FUNCTIONS;
  snprintf(names[index], sizeof names[index], "%s", name);
  *function = (void *)(FIRST_FUNCTION + index);
  return module != (void *)24;
}
int cuFuncSetAttribute(void *function, int which, int value) {
  shared_limits[(uintptr_t)function - FIRST_FUNCTION] = value;
  return which != 8;
}
int cuTensorMapEncodeTiled(void *map, int data_type, unsigned rank, uint64_t address, const uint64_t *extents, const uint64_t *strides,
                           const unsigned *box, const unsigned *element_strides, int interleave, int swizzle, int promotion, int nan_fill) {
  recorded_map seen;
  memset(&seen, 0, sizeof seen);
  // The rules of cuTensorMapEncodeTiled that wrong arguments would break.
  if ((uintptr_t)map % 64 || address % 16 || !address || rank != 5) return 1;
  for (unsigned i = 0; i < 5; i++) {
    if (!extents[i] || extents[i] > (uint64_t)1 << 32 || !box[i] || box[i] > 256 || element_strides[i] != 1) return 1;
    if (i < 4 && (strides[i] % 16 || strides[i] >= (uint64_t)1 << 40)) return 1;
    seen.extents[i] = extents[i];
    seen.box[i] = (uint16_t)box[i];
    seen.element_strides[i] = (uint8_t)element_strides[i];
    if (i < 4) seen.strides[i] = strides[i];
  }
  seen.address = address;
  seen.data_type = (uint8_t)data_type;
  seen.rank = (uint8_t)rank;
  seen.interleave = (uint8_t)interleave;
  seen.swizzle = (uint8_t)swizzle;
  seen.promotion = (uint8_t)promotion;
  seen.nan_fill = (uint8_t)nan_fill;
  memset(map, 0, 128);
  memcpy(map, &seen, sizeof seen);
  encodings++;
  return 0;
}
int cuLaunchKernelEx(const launch_config *config, void *function, void **values, void **extra) {
  uintptr_t index = (uintptr_t)function - FIRST_FUNCTION;
  if (fail_next_launch) {
    fail_next_launch = 0;
    return 1;
  }
  if (index >= MAX_FUNCTIONS || extra || (int)config->shared > shared_limits[index]) return 1;
  if (config->count > 1 || (config->count && config->attributes->id != 4)) return 1;
  launches++;
  memcpy(grid, config->grid, sizeof grid);
  memcpy(block, config->block, sizeof block);
  shared_bytes = config->shared;
  stream = (uint64_t)(uintptr_t)config->stream;
  cluster = config->count ? config->attributes->value[0] : 1;
  memcpy(launched, names[index], sizeof launched);
  memset(parameters, 0, sizeof parameters);
  for (unsigned i = 0; i < parameter_count; i++) memcpy(parameters[i], values[i], parameter_sizes[i]);
  return 0;
}
