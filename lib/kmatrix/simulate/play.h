/* SPDX-License-Identifier: MIT
 *
 * Types and functions shared by table.c (parser), play.c (evaluation), nvml.c and lists.c (NVML functions).
 */
#ifndef KMATRIX_PLAY_H
#define KMATRIX_PLAY_H

#define MAX_GPUS 64
#define MAX_PROCESSES 1024
#define MIB 1048576.0
#define EPSILON 1e-9 /* s: tolerance for times that are rounded to slightly before a knot */

typedef enum {
    OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9,
    TIMEOUT = 10, OTHER_VERSION = 25, UNKNOWN = 999
} Code; /* nvmlReturn_t */

typedef enum {
    UTIL, MEMUTIL, MEM, MEMTOTAL, POWER, AVERAGE, INSTANT, LIMIT, TEMP, SMCLK, FAN, THROTTLE,
    PCIE_TX, PCIE_RX, ECC_U, SMACT, TENSOR, DRAM, MEMTEMP, NVLINK_TX, NVLINK_RX, XID, ENERGY, ALL, FIELDS
} Field;

/* sum: the integral of the value from second 0 to `time`. */
typedef struct { double time, value, sum; Code code; } Knot;
typedef struct { Knot *knots; int count; } Series;
typedef struct { double time, mib; unsigned pid; } Holding;
typedef struct {
    unsigned index;
    int node, pcie_switch;      /* switch -1: not shared with another GPU */
    unsigned long long links;   /* one bit per GPU connected by NVLink */
    Series series[FIELDS];
    Series counter; /* values to which the energy counter was set */
    Holding *holdings;
    int holding_count;
} Device;

/* A scenario: read once, then immutable, so that threads can share it. Times are in s. */
typedef struct {
    Device devices[MAX_GPUS];
    int gpu_count;
    double loop, window, instant, call, speed;
    double freeze; /* s at which time stands still; negative: time advances */
    double epoch;  /* Unix time of second 0 */
    double period[FIELDS];
    char name[64], driver[64];
    Code init; /* return code of nvmlInit */
} Scenario;
extern Scenario scenario;

/* nvmlProcessInfo_t */
typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute_instance; } Process;

/* table.c */
void read_table(void); /* into `scenario` */

/* play.c */
double wall(void);            /* Unix time */
double now_s(void);           /* s of the scenario */
double tick(Field field);     /* time of the scenario (s) at which the field last changed */
long long stamp(double time); /* time of the scenario as Unix time in microseconds */
Code whole_gpu(const Device *gpu);
Code value_at(const Device *gpu, Field field, double time, double *value);
double mean(const Device *gpu, Field field, double begin, double end); /* begin < end */
Code mean_power(const Device *gpu, double time, double window, unsigned *milliwatts);
Code power_field(const Device *gpu, double time, Field field, unsigned *milliwatts); /* field: AVERAGE or INSTANT */
Code energy(const Device *gpu, double time, unsigned long long *millijoules);
double counted_until(const Device *gpu, Field field, double time); /* integral from second 0, over all loops */
const Knot *next_change(const Device *gpu, Field field, double after, double until); /* NULL: none */
unsigned running(const Device *gpu, Process out[MAX_PROCESSES]);

/* nvml.c */
#define API __attribute__((visibility("default")))
Code ask(const Device *gpu); /* common start of all calls on a GPU */
Code rounded(const Device *gpu, Field field, double scale, unsigned *out);
Code asked(const Device *gpu, Field field, double scale, unsigned *out); /* ask, then rounded */

#endif
