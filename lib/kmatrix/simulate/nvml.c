/* SPDX-License-Identifier: MIT
 *
 * A libnvidia-ml.so.1 that plays a scenario instead of asking a driver, for machines without a GPU.
 *
 * It is built by simulate/library.py. The functions below read a table that scenario.py wrote. Functions that return
 * lists are in lists.c. All other functions that the Python client uses return "not supported" (generated stubs).
 *
 *   KMATRIX_SIMULATE         path of the table; if unset, nvmlInit returns NVML_ERROR_DRIVER_NOT_LOADED
 *   KMATRIX_SIMULATE_EPOCH   Unix time of second 0 of the scenario, equal in all processes of a test
 *
 * The name of a GPU always ends in "(simulated)", whatever the table contains.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "play.h"

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int users; /* nvmlInit calls without nvmlShutdown */

static int valid(const Device *gpu) {
    return gpu >= scenario.devices && gpu < scenario.devices + scenario.gpu_count;
}

/* Common start of all calls on a GPU: spend the time of a driver call, then check that the GPU responds. */
Code ask(const Device *gpu) {
    if (scenario.call > 0)
        for (double end = wall() + scenario.call; wall() < end;) continue;
    if (users <= 0) return UNINITIALIZED;
    return valid(gpu) ? whole_gpu(gpu) : INVALID;
}

Code rounded(const Device *gpu, Field field, double scale, unsigned *out) {
    double value;
    if (!out) return INVALID;
    Code code = value_at(gpu, field, tick(field), &value);
    if (!code) *out = (unsigned)llround(value * scale);
    return code;
}

Code asked(const Device *gpu, Field field, double scale, unsigned *out) {
    Code code = ask(gpu);
    return code ? code : rounded(gpu, field, scale, out);
}

static Code text(char *buffer, unsigned size, const char *value) {
    if (!buffer) return INVALID;
    if (strlen(value) >= size) return TOO_SMALL;
    strcpy(buffer, value);
    return OK;
}

/* ---- the library and its devices ---- */

API Code nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_once(&once, read_table);
    if (scenario.init == OK) users++;
    return scenario.init;
}
API Code nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API Code nvmlInit(void) { return nvmlInitWithFlags(0); }
API Code nvmlShutdown(void) {
    if (users <= 0) return UNINITIALIZED;
    users--;
    return OK;
}

API const char *nvmlErrorString(Code code) {
    static const char *const known[] = {
        "Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions",
        "Already Initialized", "Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded",
        "Timeout", "Interrupt Request Issue", "NVML Shared Library Not Found", "Function Not Found",
        "Corrupted infoROM", "GPU is lost", "GPU requires restart", "The operating system has blocked the request.",
        "Driver/library version mismatch"
    };
    return code < sizeof known / sizeof *known ? known[code] : "Unknown Error";
}

API Code nvmlSystemGetDriverVersion(char *buffer, unsigned size) {
    return text(buffer, size, scenario.driver);
}
API Code nvmlSystemGetCudaDriverVersion_v2(int *out) { return out ? (*out = 13000, OK) : INVALID; }

API Code nvmlDeviceGetCount_v2(unsigned *out) {
    if (users <= 0) return UNINITIALIZED;
    return out ? (*out = (unsigned)scenario.gpu_count, OK) : INVALID; /* includes lost GPUs, like the driver */
}

static Code hand_out(Device *gpu, Device **out) {
    Code code = ask(gpu);
    if (!code) *out = gpu;
    return code;
}
API Code nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    if (users <= 0) return UNINITIALIZED;
    return index < (unsigned)scenario.gpu_count && out ? hand_out(&scenario.devices[index], out) : INVALID;
}

static void uuid_of(const Device *gpu, char *buffer) {
    sprintf(buffer, "GPU-00000000-0000-4000-8000-%012x", gpu->index);
}
static void bus_of(const Device *gpu, char *buffer) { sprintf(buffer, "00000000:%02X:00.0", gpu->index + 1); }

API Code nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    char own[64];
    for (int i = 0; uuid && out && i < scenario.gpu_count; i++) {
        uuid_of(&scenario.devices[i], own);
        if (!strcmp(own, uuid)) return hand_out(&scenario.devices[i], out);
    }
    return NOT_FOUND;
}
API Code nvmlDeviceGetName(Device *gpu, char *buffer, unsigned size) {
    Code code = ask(gpu);
    return code ? code : text(buffer, size, scenario.name);
}
API Code nvmlDeviceGetUUID(Device *gpu, char *buffer, unsigned size) {
    char own[64];
    Code code = ask(gpu);
    if (code) return code;
    uuid_of(gpu, own);
    return text(buffer, size, own);
}

typedef struct { char legacy[16]; unsigned domain, bus, device, device_id, subsystem_id; char id[32]; } Pci;
API Code nvmlDeviceGetPciInfo_v3(Device *gpu, Pci *out) {
    Code code = ask(gpu);
    if (code || !out) return code ? code : INVALID;
    memset(out, 0, sizeof *out);
    bus_of(gpu, out->id);
    strcpy(out->legacy, out->id + 4);
    out->bus = gpu->index + 1;
    out->device_id = 0x223710de;
    return OK;
}

/* ---- topology ---- */

enum { SAME_BOARD = 0, ONE_SWITCH = 10, ONE_NODE = 40, SYSTEM = 50 }; /* nvmlGpuTopologyLevel_t */
API Code nvmlDeviceGetTopologyCommonAncestor(Device *one, Device *other, int *level) {
    Code code = ask(one);
    if (!code) code = ask(other);
    if (code || !level) return code ? code : INVALID;
    if (one == other) *level = SAME_BOARD;
    else if (one->pcie_switch >= 0 && one->pcie_switch == other->pcie_switch) *level = ONE_SWITCH;
    else *level = one->node == other->node ? ONE_NODE : SYSTEM;
    return OK;
}

/* The peer of a link. Links are numbered from 0, one per peer. */
static Device *peer_of(const Device *gpu, unsigned link) {
    for (int peer = 0; peer < scenario.gpu_count; peer++)
        if (gpu->links >> peer & 1 && link-- == 0) return &scenario.devices[peer];
    return NULL;
}
API Code nvmlDeviceGetNvLinkState(Device *gpu, unsigned link, unsigned *active) {
    Code code = ask(gpu);
    if (code || !active) return code ? code : INVALID;
    if (!gpu->links) return NOT_SUPPORTED;
    if (link >= 18) return INVALID;
    *active = peer_of(gpu, link) != NULL;
    return OK;
}
API Code nvmlDeviceGetNvLinkRemoteDeviceType(Device *gpu, unsigned link, int *type) {
    Code code = ask(gpu);
    if (code || !type) return code ? code : INVALID;
    if (!peer_of(gpu, link)) return gpu->links ? INVALID : NOT_SUPPORTED;
    *type = 0; /* NVML_NVLINK_DEVICE_TYPE_GPU */
    return OK;
}
API Code nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *gpu, unsigned link, Pci *out) {
    Code code = ask(gpu);
    if (code) return code;
    Device *peer = peer_of(gpu, link);
    return peer ? nvmlDeviceGetPciInfo_v3(peer, out) : gpu->links ? INVALID : NOT_SUPPORTED;
}

/* A constant of a GPU. `value` may refer to gpu. */
#define CONSTANT(function, type, value)                     \
    API Code function(Device *gpu, type *out) {             \
        Code code = ask(gpu);                               \
        if (code || !out) return code ? code : INVALID;     \
        *out = (type)(value);                               \
        return OK;                                          \
    }
CONSTANT(nvmlDeviceGetIndex, unsigned, gpu->index)
CONSTANT(nvmlDeviceGetPersistenceMode, unsigned, 1)
CONSTANT(nvmlDeviceGetComputeMode, unsigned, 0)
CONSTANT(nvmlDeviceGetDisplayActive, unsigned, 0)

API Code nvmlDeviceGetMigMode(Device *gpu, unsigned *now, unsigned *next) {
    Code code = ask(gpu);
    if (code || !now || !next) return code ? code : INVALID;
    *now = *next = 0;
    return OK;
}

/* ---- readings ---- */

#define READING(function, field, scale) \
    API Code function(Device *gpu, unsigned *out) { return asked(gpu, field, scale, out); }
READING(nvmlDeviceGetEnforcedPowerLimit, LIMIT, 1000)
READING(nvmlDeviceGetFanSpeed, FAN, 1)

API Code nvmlDeviceGetClockInfo(Device *gpu, int kind, unsigned *out) { /* 0 graphics, 1 SM, 2 memory, 3 video */
    return kind == 2 ? NOT_SUPPORTED : asked(gpu, SMCLK, 1, out);
}
API Code nvmlDeviceGetPcieThroughput(Device *gpu, int kind, unsigned *out) {
    return asked(gpu, kind ? PCIE_RX : PCIE_TX, 1, out);
}

API Code nvmlDeviceGetUtilizationRates(Device *gpu, unsigned *out) { /* { gpu, memory } in percent */
    Code code = asked(gpu, UTIL, 1, out);
    return code ? code : rounded(gpu, MEMUTIL, 1, out + 1);
}

static Code memory(Device *gpu, unsigned long long *total, unsigned long long *used) {
    double all, taken;
    Code code = ask(gpu);
    if (!code) code = value_at(gpu, MEMTOTAL, tick(MEMTOTAL), &all);
    if (!code) code = value_at(gpu, MEM, tick(MEM), &taken);
    if (code) return code;
    *total = (unsigned long long)(all * MIB);
    *used = (unsigned long long)(taken * MIB);
    return OK;
}
typedef struct { unsigned long long total, free, used; } Memory;
API Code nvmlDeviceGetMemoryInfo(Device *gpu, Memory *out) {
    Code code = out ? memory(gpu, &out->total, &out->used) : INVALID;
    if (!code) out->free = out->total - out->used;
    return code;
}
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
API Code nvmlDeviceGetMemoryInfo_v2(Device *gpu, Memory2 *out) {
    Code code = out ? memory(gpu, &out->total, &out->used) : INVALID;
    if (!code) out->reserved = 0;
    if (!code) out->free = out->total - out->used;
    return code;
}
API Code nvmlDeviceGetPowerUsage(Device *gpu, unsigned *out) {
    Code code = ask(gpu);
    return code ? code : mean_power(gpu, tick(POWER), scenario.window, out);
}
API Code nvmlDeviceGetTotalEnergyConsumption(Device *gpu, unsigned long long *out) {
    Code code = ask(gpu);
    return code ? code : energy(gpu, tick(ENERGY), out);
}

API Code nvmlDeviceGetTemperature(Device *gpu, int sensor, unsigned *out) {
    return sensor ? INVALID : asked(gpu, TEMP, 1, out);
}
typedef struct { unsigned version; int sensor, celsius; } Temperature;
API Code nvmlDeviceGetTemperatureV(Device *gpu, Temperature *out) {
    unsigned celsius;
    if (!out || out->version != (sizeof(Temperature) | 1u << 24)) return out ? OTHER_VERSION : INVALID;
    Code code = nvmlDeviceGetTemperature(gpu, out->sensor, &celsius);
    if (!code) out->celsius = (int)celsius;
    return code;
}
static Code wide(Device *gpu, Field field, unsigned long long *out) {
    unsigned value;
    Code code = out ? asked(gpu, field, 1, &value) : INVALID;
    if (!code) *out = value;
    return code;
}
API Code nvmlDeviceGetCurrentClocksThrottleReasons(Device *gpu, unsigned long long *out) {
    return wide(gpu, THROTTLE, out);
}
API Code nvmlDeviceGetCurrentClocksEventReasons(Device *gpu, unsigned long long *out) {
    return wide(gpu, THROTTLE, out);
}
API Code nvmlDeviceGetTotalEccErrors(Device *gpu, int type, int counter, unsigned long long *out) {
    (void)counter;
    return type ? wide(gpu, ECC_U, out) : NOT_SUPPORTED;
}
