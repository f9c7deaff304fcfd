/* SPDX-License-Identifier: MIT
 *
 * What a scenario says at this moment.
 *
 * Values are steps: a knot holds until the next one. That makes the energy counter the exact sum of watts x seconds.
 */
#define _GNU_SOURCE
#include <math.h>
#include <time.h>

#include "play.h"

double wall(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Seconds of the scenario. */
double now_s(void) {
    return scenario.freeze >= 0 ? scenario.freeze : (wall() - scenario.epoch) * scenario.speed;
}

double tick(Field field) {
    double period = scenario.period[field];
    return floor((now_s() + MOMENT) / period) * period;
}

/* Values begin anew after scenario.loop; what happens once (all, energy, processes) does not. */
static double looped(double time) {
    return scenario.loop > 0 && time >= 0 ? fmod(time + MOMENT, scenario.loop) : time;
}

/* The last knot that is not later than `time`. The first one lies before all times. */
static const Knot *knot_at(const Series *series, double time) {
    int low = 0, high = series->count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (series->knots[middle].time <= time + MOMENT) low = middle;
        else high = middle - 1;
    }
    return &series->knots[low];
}

/* Value x seconds from 0 to `time` of one pass through the scenario. */
static double integral(const Series *series, double time) {
    const Knot *knot = knot_at(series, time);
    return time <= 0 ? 0 : knot->sum + knot->value * (time - fmax(knot->time, 0));
}

/* The same over all passes until `time`. */
static double area(const Device *gpu, Field field, double time) {
    const Series *series = &gpu->series[field];
    double passes = scenario.loop > 0 && time > 0 ? floor((time + MOMENT) / scenario.loop) : 0;
    return passes * integral(series, scenario.loop) + integral(series, time - passes * scenario.loop);
}

static double joules(const Device *gpu, double time) { return area(gpu, POWER, time); }

double mean(const Device *gpu, Field field, double begin, double end) {
    return (area(gpu, field, end) - area(gpu, field, begin)) / (end - begin);
}

/* Whether it answers at all. */
Code whole_gpu(const Device *gpu) { return knot_at(&gpu->series[ALL], now_s())->code; }

long long stamp(double time) { return llround((scenario.epoch + time / scenario.speed) * 1e6); }

Code value_at(const Device *gpu, Field field, double time, double *value) {
    const Knot *knot = knot_at(&gpu->series[field], looped(time));
    *value = knot->value;
    return knot->code;
}

/* The mean of the `window` seconds before `time`; the value of the moment where the window is 0. */
Code mean_power(const Device *gpu, double time, double window, unsigned *milliwatts) {
    double watts, begin = fmax(time - window, 0);
    Code code = value_at(gpu, POWER, time, &watts);
    if (code || !milliwatts) return code ? code : INVALID;
    if (time - begin > MOMENT) watts = (joules(gpu, time) - joules(gpu, begin)) / (time - begin);
    *milliwatts = (unsigned)llround(watts * 1000);
    return OK;
}

/* POWER_AVERAGE and POWER_INSTANT: an older driver has neither, so each can be scripted to fail. */
Code power_field(const Device *gpu, double time, Field field, unsigned *milliwatts) {
    double unused;
    Code code = value_at(gpu, field, time, &unused);
    return code ? code : mean_power(gpu, time, field == INSTANT ? scenario.instant : scenario.window, milliwatts);
}

/* The counter: what it was last set to, and what was drawn since. */
Code energy(const Device *gpu, double time, unsigned long long *millijoules) {
    const Knot *failing = knot_at(&gpu->series[ENERGY], time), *set = knot_at(&gpu->counter, time);
    if (failing->code || !millijoules) return failing->code ? failing->code : INVALID;
    double drawn = joules(gpu, time) - joules(gpu, fmax(set->time, 0));
    *millijoules = (unsigned long long)llround((set->value + fmax(drawn, 0)) * 1000);
    return OK;
}

/* The highest value from second 0 on. */
unsigned highest(const Device *gpu, Field field) {
    const Series *series = &gpu->series[field];
    const Knot *knot = knot_at(series, 0), *end = series->knots + series->count;
    double most = 0;
    for (; knot < end; knot++) most = fmax(most, knot->value);
    return (unsigned)llround(most);
}

/* Who holds memory now; returns how many they are. */
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
