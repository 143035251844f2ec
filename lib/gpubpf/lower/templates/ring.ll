; Reserves a record in a ring buffer (ebpf/maps.py has the layout), or counts it as lost. Returns the record's address, or 0, and
; its mark.
;
; On a target with warps, the lowest of the lanes that run this together reserves for all of them: one atomic operation serves up to
; 32 records. Positions are compared by their low 32 bits, which is enough because they differ by less than 2^32.
declare i32 @llvm.umin.i32(i32, i32)
declare i32 @llvm.ctpop.i32(i32)
; if warps
declare i32 @llvm.nvvm.activemask()
declare i32 @llvm.nvvm.read.ptx.sreg.lanemask.lt()
declare i1 @llvm.nvvm.vote.any.sync(i32, i1)
declare i32 @llvm.nvvm.shfl.sync.idx.i32(i32, i32, i32, i32)
declare i32 @llvm.cttz.i32(i32, i1)
; end

define internal { i64, i32 } @$name(i64 %base, i32 %sm) alwaysinline nounwind convergent {
entry:
  %control = inttoptr i64 %base to $pointer
  %shards = load i32, $pointer %control, align 8
  %capacity_at = getelementptr i8, $pointer %control, i64 8
  %capacity = load i32, $pointer %capacity_at, align 8
  %data_at = getelementptr i8, $pointer %control, i64 16
  %data = load i64, $pointer %data_at, align 8
  %last = sub i32 %shards, 1
  %shard = call i32 @llvm.umin.i32(i32 %sm, i32 %last)
  %wide = zext i32 %shard to i64
  %own = mul i64 %wide, $shard_size
  %own_from = add i64 %own, $header_size
  %reserved_at = getelementptr i8, $pointer %control, i64 %own_from
  %lost_at = getelementptr i8, $pointer %reserved_at, i64 8
  %consumed_at = getelementptr i8, $pointer %reserved_at, i64 16
; if warps
  %mask = call i32 @llvm.nvvm.activemask()
  %lower = call i32 @llvm.nvvm.read.ptx.sreg.lanemask.lt()
  %below = and i32 %mask, %lower
; else
  %mask = add i32 1, 0
  %below = add i32 0, 0
; end
  %lanes = call i32 @llvm.ctpop.i32(i32 %mask)
  %rank = call i32 @llvm.ctpop.i32(i32 %below)
  %many = zext i32 %lanes to i64
  %first = icmp eq i32 %below, 0
  br i1 %first, label %reserve, label %join
reserve:
  %needed = add i32 %lanes, $margin
  %reserved = load atomic i32, $pointer %reserved_at $scope monotonic, align 8
  %consumed = load atomic i32, $pointer %consumed_at $scope monotonic, align 8
  %used = sub i32 %reserved, %consumed
  %end = add i32 %used, %needed
  %fits = icmp ule i32 %end, %capacity
  br i1 %fits, label %take, label %look
; The tool may have consumed records since: it writes that to the data's header, in host memory.
look:
  %file = inttoptr i64 %data to $pointer
  %told_at = getelementptr i8, $pointer %file, i64 %own
  %told = load atomic i64, $pointer %told_at monotonic, align 8
  store atomic i64 %told, $pointer %consumed_at $scope monotonic, align 8
  %taken = trunc i64 %told to i32
  %left = sub i32 %reserved, %taken
  %end_now = add i32 %left, %needed
  %fits_now = icmp ule i32 %end_now, %capacity
  br i1 %fits_now, label %take, label %full
full:
  %lost = atomicrmw add $pointer %lost_at, i64 %many $scope monotonic
  br label %join
take:
  %before = atomicrmw add $pointer %reserved_at, i64 %many $scope monotonic
  %start = trunc i64 %before to i32
  br label %join
join:
  %ok = phi i1 [ false, %entry ], [ false, %full ], [ true, %take ]
  %from = phi i32 [ 0, %entry ], [ 0, %full ], [ %start, %take ]
; if warps
  %got = call i1 @llvm.nvvm.vote.any.sync(i32 %mask, i1 %ok)
  %leader = call i32 @llvm.cttz.i32(i32 %mask, i1 true)
  %common = call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 %mask, i32 %from, i32 %leader, i32 31)
; else
  %got = xor i1 %ok, false
  %common = add i32 %from, 0
; end
  br i1 %got, label %good, label %none
none:
  ret { i64, i32 } zeroinitializer
good:
  %position = add i32 %common, %rank
  %modulo = sub i32 %capacity, 1
  %slot = and i32 %position, %modulo
  %row = mul i32 %shard, %capacity
  %number = add i32 %row, %slot
  %number_wide = zext i32 %number to i64
  %place = mul i64 %number_wide, $stride
  %heads = mul i32 %shards, $shard_size
  %heads_up = add i32 %heads, $page_mask
  %records = and i32 %heads_up, -$page_size
  %records_wide = zext i32 %records to i64
  %records_at = add i64 %data, %records_wide
  %address = add i64 %records_at, %place
  %mark = add i32 %position, 1
  %one = insertvalue { i64, i32 } zeroinitializer, i64 %address, 0
  %both = insertvalue { i64, i32 } %one, i32 %mark, 1
  ret { i64, i32 } %both
}
