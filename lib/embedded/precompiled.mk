# For the Makefiles of the C++ parts: reading headers is half of the work for a file, so g++ does it once for a directory.
#
#   $(eval $(call precompile,DIRECTORY,HEADER,OBJECTS))
#
# OBJECTS are compiled as if each file included HEADER first: $(PRECOMPILED) are the options for that. The result is in
# $(BUILD)/DIRECTORY. FLAGS and INCLUDES must have their values. Other compilers, such as the one for packages, do not get the header, so
# each file still has to include what it uses.
.DEFAULT_GOAL := all
EMBEDDED := $(dir $(lastword $(MAKEFILE_LIST)))
define precompile
ifneq ($$(filter g++% %-g++,$$(notdir $$(firstword $$(CXX)))),)
$(BUILD)/$(1)/precompiled.h.gch: FLAGS := $$(FLAGS)
$(BUILD)/$(1)/precompiled.h.gch: PRECOMPILED :=
$(BUILD)/$(1)/precompiled.h.gch: Makefile $(EMBEDDED)precompiled.mk $(4)
	@mkdir -p $$(@D)
	@echo '#include "$(2)"' > $$(@:.gch=)
	@$$(CXX) $$(FLAGS) $$(INCLUDES) -MMD -MP -x c++-header -o $$@ $$(@:.gch=)
	@sed -e '1s|^[^:]*:|$(3):|' -e 's| [^ ]*/precompiled[.]h | |' $$(@:.gch=.d) > $$(@D)/objects.d
# Objects that are newer than their headers do not need it. For g++, they do not depend on what it was made of.
.SECONDARY: $(BUILD)/$(1)/precompiled.h.gch
$(3): PRECOMPILED := -include $(BUILD)/$(1)/precompiled.h
$(3): | $(BUILD)/$(1)/precompiled.h.gch
-include $(BUILD)/$(1)/precompiled.h.d $(BUILD)/$(1)/objects.d
endif
endef
