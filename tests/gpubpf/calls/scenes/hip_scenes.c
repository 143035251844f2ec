/*
 * hip_scenes call|gap WHAT ARGUMENT: launches twice, and in between does WHAT, inside of hipMemcpy or outside of any call. With the
 * library that stands in for HIP's, and library.c.
 */
#include "hip.h"
#include "kernels.h"
#include "scenes.h"

#include <stdio.h>
#include <string.h>

void standin_inside(void (*function)(const char *name));

KERNEL(step, "_Z4stepPf")

static char **arguments;
static int failed;

static void inside(const char *name)
{
    if (!strcmp(name, "hipMemcpy") && !strcmp(arguments[1], "call"))
        failed = scene_plainly(arguments[2], arguments[3]);
}

static void launch(void)
{
    dim3 one = {1, 1, 1};
    hipLaunchKernel(&step, one, one, 0, 0, 0);
}

int main(int argc, char **argv)
{
    char bytes[4] = {0};
    if (argc != 4)
        return 2;
    arguments = argv;
    standin_inside(inside);
    register_module();
    register_kernel(&step, "_Z4stepPf");
    launch();
    hipMemcpy(bytes, "abc", 4, hipMemcpyHostToHost);
    if (!strcmp(argv[1], "gap"))
        failed = scene_plainly(argv[2], argv[3]);
    launch();
    if (failed)
        perror(argv[2]);
    return failed ? 1 : 0;
}
