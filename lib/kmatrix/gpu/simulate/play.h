/* SPDX-License-Identifier: MIT
 *
 * What table.c reads, play.c plays, and nvml.c and lists.c answer with.
 */
#ifndef KMATRIX_PLAY_H
#define KMATRIX_PLAY_H

#define MAX_GPUS 64
#define MAX_PROCESSES 64
#define MIB 1048576.0
#define MOMENT 1e-9 /* seconds: what rounding may take from a time that lies on a knot */

typedef enum {
    OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, NO_DRIVER = 9,
    OTHER_VERSION = 25, UNKNOWN = 999
} Code; /* nvmlReturn_t */

typedef enum {
    UTIL, MEMUTIL, MEM, MEMTOTAL, POWER, AVERAGE, INSTANT, LIMIT, TEMP, SMCLK, MEMCLK, FAN, THROTTLE,
    PCIE_TX, PCIE_RX, ECC_C, ECC_U, PSTATE, SMACT, SMOCC, TENSOR, DRAM, ENERGY, ALL, FIELDS
} Field;

/* sum: the integral of the value from second 0 to `time`. */
typedef struct { double time, value, sum; Code code; } Knot;
typedef struct { Knot *knots; int count; } Series;
typedef struct { double time, mib; unsigned pid; } Holding;
typedef struct {
    unsigned index;
    int node, pcie_switch;      /* of a switch of its own: -1 */
    unsigned long long links;   /* a bit for each GPU behind an NVLink */
    Series series[FIELDS];
    Series counter; /* where the energy counter was set */
    Holding *holdings;
    int holding_count;
} Device;

/* A scenario: read once, never changed afterwards, so that threads may share it. Times are in seconds. */
typedef struct {
    Device devices[MAX_GPUS];
    int gpu_count;
    double loop, window, instant, call, speed;
    double freeze; /* below 0: time goes on */
    double epoch;  /* Unix time of second 0 */
    double period[FIELDS];
    char name[64], driver[64];
    Code init; /* what nvmlInit answers */
} Scenario;
extern Scenario scenario;

/* nvmlProcessInfo_t */
typedef struct { unsigned pid; unsigned long long bytes; unsigned instance, compute_instance; } Process;

/* table.c */
void read_table(void); /* into `scenario` */

/* play.c */
double wall(void);            /* Unix time */
double now_s(void);           /* seconds of the scenario */
double tick(Field field);     /* the moment of the scenario at which the field last changed */
long long stamp(double time); /* a moment of the scenario in microseconds since 1970 */
Code whole_gpu(const Device *gpu);
Code value_at(const Device *gpu, Field field, double time, double *value);
double mean(const Device *gpu, Field field, double begin, double end); /* over a span that is not empty */
Code mean_power(const Device *gpu, double time, double window, unsigned *milliwatts);
Code power_field(const Device *gpu, double time, Field field, unsigned *milliwatts); /* field: AVERAGE or INSTANT */
Code energy(const Device *gpu, double time, unsigned long long *millijoules);
unsigned highest(const Device *gpu, Field field);
unsigned running(const Device *gpu, Process out[MAX_PROCESSES]);

/* nvml.c */
#define API __attribute__((visibility("default")))
Code ask(const Device *gpu); /* what every question to a GPU begins with */
Code rounded(const Device *gpu, Field field, double scale, unsigned *out);
Code asked(const Device *gpu, Field field, double scale, unsigned *out); /* both */

#endif
