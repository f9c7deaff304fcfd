/* SPDX-License-Identifier: MIT
 *
 * Evaluate a scenario at a point in time.
 *
 * Values are step functions: a knot is valid until the next one. So the energy counter is the exact integral of power.
 */
#define _GNU_SOURCE
#include <math.h>
#include <stddef.h>
#include <time.h>

#include "play.h"

double wall(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Current time of the scenario, s. */
double now_s(void) {
    return scenario.freeze >= 0 ? scenario.freeze : (wall() - scenario.epoch) * scenario.speed;
}

double tick(Field field) {
    double period = scenario.period[field];
    return floor((now_s() + EPSILON) / period) * period;
}

/* Values repeat after scenario.loop, except fields that change once (all, energy, processes). */
static double looped(double time) {
    return scenario.loop > 0 && time >= 0 ? fmod(time + EPSILON, scenario.loop) : time;
}

/* The last knot at or before `time`. The first knot precedes all times. */
static const Knot *knot_at(const Series *series, double time) {
    int low = 0, high = series->count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (series->knots[middle].time <= time + EPSILON) low = middle;
        else high = middle - 1;
    }
    return &series->knots[low];
}

/* Integral of the value from 0 to `time` within one loop. */
static double integral(const Series *series, double time) {
    const Knot *knot = knot_at(series, time);
    return time <= 0 ? 0 : knot->sum + knot->value * (time - fmax(knot->time, 0));
}

/* The same over all loops until `time`. */
static double area(const Device *gpu, Field field, double time) {
    const Series *series = &gpu->series[field];
    double passes = scenario.loop > 0 && time > 0 ? floor((time + EPSILON) / scenario.loop) : 0;
    return passes * integral(series, scenario.loop) + integral(series, time - passes * scenario.loop);
}

double counted_until(const Device *gpu, Field field, double time) { return area(gpu, field, time); }

/* The first knot in (after, until] whose value is not 0. */
const Knot *next_change(const Device *gpu, Field field, double after, double until) {
    const Series *series = &gpu->series[field];
    for (int i = 0; i < series->count && series->knots[i].time <= until; i++)
        if (series->knots[i].time > after && series->knots[i].value > 0) return &series->knots[i];
    return NULL;
}

static double joules(const Device *gpu, double time) { return area(gpu, POWER, time); }

double mean(const Device *gpu, Field field, double begin, double end) {
    return (area(gpu, field, end) - area(gpu, field, begin)) / (end - begin);
}

/* The code of the GPU as a whole: OK if it responds. */
Code whole_gpu(const Device *gpu) { return knot_at(&gpu->series[ALL], now_s())->code; }

long long stamp(double time) { return llround((scenario.epoch + time / scenario.speed) * 1e6); }

Code value_at(const Device *gpu, Field field, double time, double *value) {
    const Knot *knot = knot_at(&gpu->series[field], looped(time));
    *value = knot->value;
    return knot->code;
}

/* Mean over the last `window` s, or the current value if the window is 0. */
Code mean_power(const Device *gpu, double time, double window, unsigned *milliwatts) {
    double watts, begin = fmax(time - window, 0);
    Code code = value_at(gpu, POWER, time, &watts);
    if (code || !milliwatts) return code ? code : INVALID;
    if (time - begin > EPSILON) watts = (joules(gpu, time) - joules(gpu, begin)) / (time - begin);
    *milliwatts = (unsigned)llround(watts * 1000);
    return OK;
}

/* POWER_AVERAGE and POWER_INSTANT. Old drivers have neither, so each can be set to an error. */
Code power_field(const Device *gpu, double time, Field field, unsigned *milliwatts) {
    double unused;
    Code code = value_at(gpu, field, time, &unused);
    return code ? code : mean_power(gpu, time, field == INSTANT ? scenario.instant : scenario.window, milliwatts);
}

/* The energy counter: its last set value plus the energy used since. */
Code energy(const Device *gpu, double time, unsigned long long *millijoules) {
    const Knot *failing = knot_at(&gpu->series[ENERGY], time), *set = knot_at(&gpu->counter, time);
    if (failing->code || !millijoules) return failing->code ? failing->code : INVALID;
    double drawn = joules(gpu, time) - joules(gpu, fmax(set->time, 0));
    *millijoules = (unsigned long long)llround((set->value + fmax(drawn, 0)) * 1000);
    return OK;
}

/* The processes that use memory now; returns their number. */
unsigned running(const Device *gpu, Process out[MAX_PROCESSES]) {
    unsigned count = 0;
    for (int i = 0; i < gpu->holding_count && gpu->holdings[i].time <= now_s(); i++) {
        const Holding *holding = &gpu->holdings[i];
        unsigned place = 0;
        while (place < count && out[place].pid != holding->pid) place++;
        if (place == MAX_PROCESSES) continue;
        if (holding->mib > 0) {
            out[place] = (Process){ holding->pid, (unsigned long long)(holding->mib * MIB), ~0u, ~0u };
            if (place == count) count++;
        } else if (place < count) {
            out[place] = out[--count];
        }
    }
    return count;
}
