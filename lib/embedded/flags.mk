# For the Makefiles of the C++ parts: the options of the compiler that decide how long it takes.
#
# script/setup without --dev gives OPTIMIZE="-O1 -g0", which takes less time. Files whose speed or whose machine code matters have -O2
# or more in any case.
OPTIMIZE ?= -O2 -g1
ifneq ($(filter g++% %-g++,$(notdir $(firstword $(CXX)))),)
# g++ looks for unused memory from 128 MB on, which takes a tenth of its time. No file needs 500 MB.
OPTIMIZE := $(OPTIMIZE) --param ggc-min-heapsize=500000
endif

# The processor that the libraries are for: x86_64 or aarch64. For another one than this machine's, give its compiler, too:
#
#   make MACHINE=aarch64 CXX=aarch64-linux-gnu-g++      the results are in build/aarch64 of the checkout
HOST_MACHINE := $(shell uname -m)
MACHINE ?= $(HOST_MACHINE)
FOREIGN := $(if $(filter-out $(HOST_MACHINE),$(MACHINE)),$(abspath $(dir $(lastword $(MAKEFILE_LIST)))/../../build/$(MACHINE)))
