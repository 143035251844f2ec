-- Instances of kernels, such as those of a template: kernels with one name, and different mangled names. A statement whose records
-- are missing is left out.

-- one row for each instance that a tool saw
CREATE TABLE instances (kernel VARCHAR, mangled VARCHAR, demangled VARCHAR);

-- launchlate
INSERT INTO instances SELECT DISTINCT kernel, mangled, demangled FROM launchlate_kernel WHERE mangled IS NOT NULL;

-- memtrace
INSERT INTO instances SELECT DISTINCT kernel, mangled, demangled FROM memtrace_kernel WHERE mangled IS NOT NULL;

-- threadhist
INSERT INTO instances SELECT DISTINCT kernel, mangled, demangled FROM threadhist_kernel WHERE mangled IS NOT NULL;

-- kernelretsnoop
INSERT INTO instances SELECT DISTINCT kernel, mangled, demangled FROM kernelretsnoop_kernel WHERE mangled IS NOT NULL;

-- gpuprofile
INSERT INTO instances SELECT DISTINCT kernel, mangled, demangled FROM gpuprofile_stack WHERE mangled IS NOT NULL;

-- warpdiv
INSERT INTO instances SELECT DISTINCT kernel, mangled, NULL FROM warpdiv_kernel WHERE mangled IS NOT NULL;

-- warpdiv
INSERT INTO instances SELECT DISTINCT kernel, mangled, NULL FROM warpdiv_branch WHERE mangled IS NOT NULL;

-- barrierlate
INSERT INTO instances SELECT DISTINCT kernel, mangled, NULL FROM barrierlate_barrier WHERE mangled IS NOT NULL;
