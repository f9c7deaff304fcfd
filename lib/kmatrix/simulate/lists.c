/* SPDX-License-Identifier: MIT
 *
 * NVML functions that return lists: processes, field values, performance metrics (GPM), events.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "play.h"


/* ---- processes ---- */

/* NVML's list convention: on entry, *count is the capacity of `out`; on return, the required length. */
static Code processes(Device *gpu, unsigned *count, Process *out) {
    Process found[MAX_PROCESSES];
    Code code = ask(gpu);
    if (code || !count) return code ? code : INVALID;
    unsigned room = *count, needed = *count = running(gpu, found);
    if (needed && (!out || room < needed)) return TOO_SMALL;
    if (needed) memcpy(out, found, needed * sizeof *found);
    return OK;
}
API Code nvmlDeviceGetComputeRunningProcesses_v3(Device *gpu, unsigned *count, Process *out) {
    return processes(gpu, count, out);
}

/* The oldest list has neither instances nor processes of other containers. */
typedef struct { unsigned pid; unsigned long long bytes; } OldProcess;
API Code nvmlDeviceGetComputeRunningProcesses(Device *gpu, unsigned *count, OldProcess *out) {
    Process found[MAX_PROCESSES];
    Code code = ask(gpu);
    if (code || !count) return code ? code : INVALID;
    unsigned room = *count, needed = *count = running(gpu, found);
    if (needed && (!out || room < needed)) return TOO_SMALL;
    for (unsigned i = 0; i < needed; i++) out[i] = (OldProcess){ found[i].pid, found[i].bytes };
    return OK;
}

static Code no_processes(Device *gpu, unsigned *count) {
    Code code = ask(gpu);
    if (!code && count) *count = 0;
    return code;
}
API Code nvmlDeviceGetGraphicsRunningProcesses_v3(Device *gpu, unsigned *count, Process *out) {
    return (void)out, no_processes(gpu, count);
}

typedef struct { unsigned pid; unsigned long long time_us; unsigned sm, memory, encoder, decoder; } Share;
API Code nvmlDeviceGetProcessUtilization(Device *gpu, Share *out, unsigned *count, unsigned long long since_us) {
    Process found[MAX_PROCESSES];
    unsigned util = 0, memutil = 0;
    Code code = asked(gpu, UTIL, 1, &util);
    (void)since_us;
    if (!code) code = rounded(gpu, MEMUTIL, 1, &memutil);
    if (code || !count) return code ? code : INVALID;
    unsigned room = *count, needed = *count = running(gpu, found);
    if (!needed) return NOT_FOUND;
    if (!out || room < needed) return TOO_SMALL;
    for (unsigned i = 0; i < needed; i++) /* utilization is divided evenly among the processes of a GPU */
        out[i] = (Share){ found[i].pid, (unsigned long long)(wall() * 1e6), util / needed, memutil / needed, 0, 0 };
    return OK;
}

/* ---- field values and samples ---- */

enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3 }; /* nvmlValueType_t */
typedef union { unsigned u; unsigned long long ull; } Value;
typedef struct { unsigned id, scope; long long time_us, latency_us; int type; Code code; Value value; } FieldValue;

/* A counter of KiB since second 0, of a field in KB/s. */
static void traffic(Device *gpu, Field field, FieldValue *out) {
    double rate;
    out->type = UNSIGNED_LONG_LONG;
    out->code = value_at(gpu, field, now_s(), &rate);
    out->value.ull = (unsigned long long)counted_until(gpu, field, fmax(now_s(), 0));
}

static void answer(Device *gpu, FieldValue *out) {
    double time = tick(out->id == 83 ? ENERGY : POWER);
    out->latency_us = 0;
    out->type = UNSIGNED_INT;
    out->time_us = stamp(time);
    out->value.ull = 0;
    switch (out->id) {
    case 83: /* TOTAL_ENERGY_CONSUMPTION */
        out->type = UNSIGNED_LONG_LONG;
        out->code = energy(gpu, time, &out->value.ull);
        break;
    case 185: out->code = power_field(gpu, time, AVERAGE, &out->value.u); break;
    case 186: out->code = power_field(gpu, time, INSTANT, &out->value.u); break;
    case 82: out->code = rounded(gpu, MEMTEMP, 1, &out->value.u); break;
    case 138: traffic(gpu, NVLINK_TX, out); break;
    case 139: traffic(gpu, NVLINK_RX, out); break;
    default: out->code = NOT_SUPPORTED;
    }
}
API Code nvmlDeviceGetFieldValues(Device *gpu, int count, FieldValue *out) {
    Code code = ask(gpu);
    if (code || !out) return code ? code : INVALID;
    for (int i = 0; i < count; i++) answer(gpu, &out[i]);
    return OK;
}

/* ---- performance metrics (GPM): means between two samples of the client ---- */

typedef struct { const Device *gpu; double time; } GpmSample;
typedef struct { unsigned id; Code code; double value; char *names[3]; } GpmMetric;
typedef struct { unsigned version, count; const GpmSample *first, *second; GpmMetric metrics[]; } GpmGet;
typedef struct { unsigned version, supported; } GpmSupport;

static Code gpm_field(unsigned id, Field *field) {
    switch (id) {
    case 2: *field = SMACT; return OK;
    case 5: *field = TENSOR; return OK;
    case 10: *field = DRAM; return OK;
    case 20: *field = PCIE_TX; return OK; /* this and the next three: MiB/s */
    case 21: *field = PCIE_RX; return OK;
    case 60: *field = NVLINK_RX; return OK;
    case 61: *field = NVLINK_TX; return OK;
    default: return NOT_SUPPORTED;
    }
}
API Code nvmlGpmQueryDeviceSupport(Device *gpu, GpmSupport *out) {
    double value;
    Code code = ask(gpu);
    if (code || !out) return code ? code : INVALID;
    out->supported = !value_at(gpu, SMACT, now_s(), &value) || !value_at(gpu, TENSOR, now_s(), &value);
    return OK;
}
API Code nvmlGpmSampleAlloc(GpmSample **out) { return out && (*out = calloc(1, sizeof **out)) ? OK : INVALID; }
API Code nvmlGpmSampleFree(GpmSample *sample) { return free(sample), OK; }
API Code nvmlGpmSampleGet(Device *gpu, GpmSample *sample) {
    Code code = ask(gpu);
    if (code || !sample) return code ? code : INVALID;
    *sample = (GpmSample){ gpu, now_s() };
    return OK;
}
API Code nvmlGpmMetricsGet(GpmGet *get) {
    if (!get || get->version != 1 || !get->first || !get->second) return INVALID;
    const GpmSample *first = get->first, *second = get->second;
    if (!first->gpu || first->gpu != second->gpu) return INVALID;
    for (unsigned i = 0; i < get->count; i++) {
        GpmMetric *metric = &get->metrics[i];
        Field field = SMACT;
        double last = 0;
        metric->code = gpm_field(metric->id, &field);
        if (!metric->code) metric->code = value_at(second->gpu, field, second->time, &last);
        double unit = metric->id >= 20 ? 1024 : 1; /* KB/s in the scenario */
        metric->value = second->time - first->time > EPSILON ? mean(second->gpu, field, first->time, second->time) : last;
        metric->value /= unit;
    }
    return OK;
}

/* ---- events: XID errors ---- */

#define XID_EVENT 8ULL /* nvmlEventTypeXidCriticalError */
typedef struct { const Device *gpus[MAX_GPUS]; double seen[MAX_GPUS]; int count; } EventSet;
typedef struct { const Device *gpu; unsigned long long type, data; unsigned instance, compute_instance; } EventData;

API Code nvmlEventSetCreate(EventSet **out) { return out && (*out = calloc(1, sizeof **out)) ? OK : INVALID; }
API Code nvmlEventSetFree(EventSet *set) { return free(set), OK; }
API Code nvmlDeviceRegisterEvents(Device *gpu, unsigned long long types, EventSet *set) {
    Code code = ask(gpu);
    if (code || !set || !(types & XID_EVENT) || set->count == MAX_GPUS) return code ? code : INVALID;
    for (int i = 0; i < set->count; i++)
        if (set->gpus[i] == gpu) return OK;
    set->gpus[set->count] = gpu;
    set->seen[set->count++] = now_s();
    return OK;
}
/* Never waits: the caller gets a timeout if there is no event now. */
API Code nvmlEventSetWait_v2(EventSet *set, EventData *out, unsigned timeout_ms) {
    (void)timeout_ms;
    if (!set || !out) return INVALID;
    for (int i = 0; i < set->count; i++) {
        const Knot *event = next_change(set->gpus[i], XID, set->seen[i], now_s());
        if (!event) continue;
        set->seen[i] = event->time;
        *out = (EventData){ set->gpus[i], XID_EVENT, (unsigned long long)event->value, ~0u, ~0u };
        return OK;
    }
    return TIMEOUT;
}
