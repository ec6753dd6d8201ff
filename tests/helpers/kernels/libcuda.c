/* A driver of CUDA without a GPU: it refuses what CUDA refuses, and launches are noted, byte for
   byte. What sizes a kernel's parameters have it reads in the cubin. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int number;
    uint16_t sizes[512];
} Function;

static Function functions[1024];
static uintptr_t loaded;
char noted[1 << 20];
size_t bytes_noted;
void (*when_launched)(void); /* called at each launch, if set */

static void note(const void *what, size_t bytes) {
    if (bytes_noted + bytes <= sizeof(noted)) {
        memcpy(noted + bytes_noted, what, bytes);
        bytes_noted += bytes;
    }
}

/* Of each parameter, a section .nv.info.NAME has a record 0x17: its number, and its size. */
int cuModuleLoadData(uintptr_t *module, const unsigned char *elf) {
    Function *function = functions + ++loaded;
    for (int i = 0; i < *(uint16_t *)(elf + 60); i++) {
        const unsigned char *section = elf + *(uint64_t *)(elf + 40) + i * *(uint16_t *)(elf + 58);
        const unsigned char *record = elf + *(uint64_t *)(section + 24);
        const unsigned char *end = record + *(uint64_t *)(section + 32);
        if (*(uint32_t *)(section + 4) != 0x70000000 || !*(uint32_t *)(section + 44))
            continue;
        for (; record + 4 <= end; record += record[0] == 4 ? 4 + *(uint16_t *)(record + 2) : 4) {
            uint16_t number = *(uint16_t *)(record + 8);
            if (record[0] != 4 || record[1] != 0x17)
                continue;
            function->sizes[number] = *(uint32_t *)(record + 12) >> 18;
            if (function->number <= number)
                function->number = number + 1;
        }
    }
    *module = loaded;
    return 0;
}

int cuModuleGetFunction(Function **function, uintptr_t module, const char *name) {
    *function = functions + module;
    return 0;
}

int cuFuncGetParamInfo(Function *function, size_t number, size_t *offset, size_t *size) {
    *offset = 0;
    *size = number < 512 ? function->sizes[number] : 0;
    return number >= (size_t)function->number;
}

int cuLaunchKernelEx(const char *config, Function *function, void **parameters, void **extra) {
    unsigned attributes = *(unsigned *)(config + 48);
    const unsigned *blocks = (const unsigned *)config;
    if (!blocks[0] || !blocks[1] || !blocks[2] || blocks[0] > INT32_MAX || blocks[1] > 65535 ||
        blocks[2] > 65535 || blocks[3] > 1024)
        return 1;
    if (when_launched)
        when_launched();
    note(config, 28); /* grid, block, shared memory */
    note(config + 32, 8); /* the stream */
    for (unsigned i = 0; i < attributes; i++) {
        const char *attribute = *(char **)(config + 40) + 72 * i;
        note(attribute, 4);
        note(attribute + 8, *(int *)attribute == 4 ? 12 : 4);
    }
    note(&function, 8);
    for (int i = 0; i < function->number; i++)
        note(parameters[i], function->sizes[i]);
    return 0;
}

/* The map says what it was encoded of, with Triton's correction of a bit in the second word. */
int cuTensorMapEncodeTiled(uint64_t *map, int type, uint32_t rank, uint64_t address,
                           const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                           const uint32_t *steps, int interleave, int swizzle, int promotion,
                           int fill) {
    static const int bytes_of[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    if ((uintptr_t)map % 64 || address % 16 || !address || rank < 1 || rank > 5 || type > 12 ||
        box[0] * bytes_of[type] % 16)
        return 1;
    for (uint32_t i = 0; i < rank; i++) {
        if (!dims[i] || dims[i] > (uint64_t)1 << 32 || !box[i] || box[i] > 256 || steps[i] != 1)
            return 1;
        if (i + 1 < rank && (strides[i] % 16 || strides[i] >> 40))
            return 1;
    }
    memset(map, 0, 128);
    map[0] = address;
    map[1] = ~(uint64_t)0;
    map[2] = type | rank << 8 | interleave << 12 | swizzle << 16 | fill << 20 | promotion << 24;
    for (uint32_t i = 0; i < rank; i++) {
        map[3 + i] = dims[i] << 32 | box[i] << 4 | steps[i];
        map[8 + i] = i + 1 < rank ? strides[i] : 0;
    }
    return 0;
}

int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 97 ? 232448 : which == 75 ? 9 : which == 76 ? 0 : 1024;
    return 0;
}

int cuFuncGetAttribute(int *value, int which, void *function) {
    *value = which == 0 ? 1024 : 0;
    return 0;
}

int cuPointerGetAttribute(uint64_t *found, int which, uint64_t pointer) {
    *found = pointer;
    return 0;
}

int driver_version;
int cuDriverGetVersion(int *version) { *version = driver_version; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuCtxGetCurrent(void **context) { *context = functions; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "invalid argument"; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return cuCtxGetCurrent(context); }
int cuOccupancyMaxActiveClusters(int *n, void *function, void *config) { *n = 1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuModuleUnload(uintptr_t module) { return 0; }
int cuFuncSetAttribute(void *function, int which, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuCtxGetLimit(size_t *value, int which) { *value = 0; return 0; }
int cuCtxSetLimit(int which, size_t value) { return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *number) { *number = 1; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }
