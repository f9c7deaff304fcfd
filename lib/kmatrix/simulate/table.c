/* SPDX-License-Identifier: MIT
 *
 * Parse the table of a scenario, which scenario.py validated and wrote. A damaged table is rejected as a whole.
 *
 * One statement per line, times in s:
 *   gpus N | loop S | window S | instant S | call S | speed X | freeze S | init CODE | name TEXT | driver TEXT
 *   place GPU NODE SWITCH LINKS  NUMA node, PCIe switch (-1: not shared), bit mask of NVLink peers in hex
 *   period FIELD S               the field changes at multiples of S only
 *   knot GPU FIELD T VALUE CODE  from T on: VALUE, or the NVML error CODE if it is not 0; ascending in T
 *   counter GPU T J              at T the energy counter is set to J joules; ascending in T
 *   process GPU T PID MIB        from T on the process uses MIB; 0 ends it; ascending in T
 *   end                          the last line
 */
#define _GNU_SOURCE
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "play.h"

#define SUFFIX " (simulated)"

Scenario scenario = { .window = 1, .speed = 1, .freeze = -1, .name = "GPU" SUFFIX, .driver = "0", .init = NO_DRIVER };

static const char *const field_names[FIELDS] = {
    "util", "memutil", "mem", "memtotal", "power", "average", "instant", "limit", "temp", "smclk", "fan",
    "throttle", "pcie_tx", "pcie_rx", "ecc_u", "smact", "tensor", "dram", "memtemp", "nvlink_tx", "nvlink_rx",
    "xid", "energy", "all"
};

static void *grown(void *array, int count, size_t size) {
    void *larger = realloc(array, (size_t)(count + 1) * size);
    if (!larger) abort();
    return larger;
}

static void append(Series *series, double time, double value, Code code) {
    double sum = 0;
    if (series->count) {
        Knot *last = &series->knots[series->count - 1];
        sum = last->sum + last->value * (fmax(time, 0) - fmax(last->time, 0));
    }
    series->knots = grown(series->knots, series->count, sizeof(Knot));
    series->knots[series->count++] = (Knot){ time, value, sum, code };
}

static int field_of(const char *name) {
    for (int field = 0; field < FIELDS; field++)
        if (!strcmp(name, field_names[field])) return field;
    return -1;
}

/* Apply one line of the table; return 0 if it is not valid. */
static int apply_line(const char *line) {
    char word[32];
    double time, value;
    int gpu, code, field;
    unsigned pid;
    int node, pcie_switch;
    unsigned long long links;
    if (sscanf(line, "gpus %d", &gpu) == 1) {
        scenario.gpu_count = gpu;
        return gpu >= 0 && gpu <= MAX_GPUS;
    }
    if (sscanf(line, "loop %lf", &scenario.loop) == 1 || sscanf(line, "window %lf", &scenario.window) == 1 ||
        sscanf(line, "instant %lf", &scenario.instant) == 1 || sscanf(line, "call %lf", &scenario.call) == 1 ||
        sscanf(line, "speed %lf", &scenario.speed) == 1 || sscanf(line, "freeze %lf", &scenario.freeze) == 1 ||
        sscanf(line, "driver %63[^\n]", scenario.driver) == 1) return 1;
    if (sscanf(line, "name %51[^\n]", scenario.name) == 1) return strcat(scenario.name, SUFFIX) != NULL;
    if (sscanf(line, "init %d", &code) == 1) { scenario.init = (Code)code; return 1; }
    if (sscanf(line, "place %d %d %d %llx", &gpu, &node, &pcie_switch, &links) == 4) {
        if (gpu < 0 || gpu >= MAX_GPUS) return 0;
        scenario.devices[gpu].node = node;
        scenario.devices[gpu].pcie_switch = pcie_switch;
        scenario.devices[gpu].links = links;
        return 1;
    }
    if (sscanf(line, "period %31s %lf", word, &value) == 2) {
        field = field_of(word);
        if (field >= 0) scenario.period[field] = value;
        return field >= 0 && value > 0;
    }
    if (sscanf(line, "knot %d %31s %lf %lf %d", &gpu, word, &time, &value, &code) == 5) {
        field = field_of(word);
        if (field < 0 || gpu < 0 || gpu >= MAX_GPUS) return 0;
        append(&scenario.devices[gpu].series[field], time, value, (Code)code);
        return 1;
    }
    if (sscanf(line, "counter %d %lf %lf", &gpu, &time, &value) == 3 && gpu >= 0 && gpu < MAX_GPUS) {
        append(&scenario.devices[gpu].counter, time, value, OK);
        return 1;
    }
    if (sscanf(line, "process %d %lf %u %lf", &gpu, &time, &pid, &value) == 4 && gpu >= 0 && gpu < MAX_GPUS) {
        Device *device = &scenario.devices[gpu];
        device->holdings = grown(device->holdings, device->holding_count, sizeof(Holding));
        device->holdings[device->holding_count++] = (Holding){ time, value, pid };
        return 1;
    }
    return 0;
}

/* Every field of every GPU needs a first knot and a period. */
static int complete(void) {
    for (int gpu = 0; gpu < scenario.gpu_count; gpu++) {
        const Device *device = &scenario.devices[gpu];
        if (!device->counter.count) return 0;
        for (int field = 0; field < FIELDS; field++)
            if (!device->series[field].count || scenario.period[field] <= 0) return 0;
    }
    return 1;
}

static void read_from(FILE *table, const char *path) {
    const char *start = getenv("KMATRIX_SIMULATE_EPOCH");
    char line[256];
    int number = 0, good = 1, ended = 0;
    scenario.epoch = start ? strtod(start, NULL) : wall();
    scenario.init = OK;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) scenario.devices[gpu].index = (unsigned)gpu;
    while (good && !ended && fgets(line, sizeof line, table)) {
        number++;
        ended = !strcmp(line, "end\n");
        good = ended || apply_line(line);
    }
    if (good && ended && complete()) return;
    fprintf(stderr, "simulated NVML: %s:%d: the table is damaged\n", path, number);
    scenario.init = UNKNOWN;
}

void read_table(void) {
    const char *path = getenv("KMATRIX_SIMULATE");
    if (!path || !*path) return;
    FILE *table = fopen(path, "re");
    if (!table) {
        fprintf(stderr, "simulated NVML: cannot open %s\n", path);
        return;
    }
    locale_t plain = newlocale(LC_ALL_MASK, "C", (locale_t)0); /* the locale of the program may use a decimal comma */
    locale_t before = plain ? uselocale(plain) : (locale_t)0;
    read_from(table, path);
    if (before) uselocale(before);
    if (plain) freelocale(plain);
    fclose(table);
}
