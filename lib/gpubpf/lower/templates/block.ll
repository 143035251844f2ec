; Returns whether this thread runs a program for its block: the first thread of the block that calls this, or (`last`) the last
; one, which then sees what the others did before. Each thread of a block calls it once.
;
; A slot of a hash table (ebpf/maps.py has the layout) counts the threads that came. The first thread takes the slot, and the last
; one gives it back. A block may be in any of `probes` slots, beginning with its home; it takes the first free one, and no thread
; waits. But a slot that becomes free in front of it must not be taken for the same block again. So a thread that passes a slot
; leaves a mark in it, and no block takes a slot with a mark. A mark stays while the thread that left it searches further, and if that
; thread takes a slot, until this slot is given back. A thread that finds no slot is counted as lost. (It may leave a slot taken; the
; blocks that run at a time fill a quarter of the table on today's GPUs.)
; if warps
declare i32 @llvm.nvvm.activemask()
declare i32 @llvm.nvvm.read.ptx.sreg.lanemask.lt()
declare i32 @llvm.ctpop.i32(i32)
; end
; if waves
declare i64 @llvm.ctpop.i64(i64)
; end

define internal i1 @$name(i64 %base, i64 %launch, i64 %block, i32 %threads) alwaysinline nounwind convergent {
entry:
; if together
; The lowest of the lanes that come together speaks for all of them.
; if warps
  %mask = call i32 @llvm.nvvm.activemask()
  %lower = call i32 @llvm.nvvm.read.ptx.sreg.lanemask.lt()
  %below = and i32 %mask, %lower
  %many = call i32 @llvm.ctpop.i32(i32 %mask)
  %speaks = icmp eq i32 %below, 0
; else
  %mask = call i64 @gpubpf.active()
  %lower = call i64 @gpubpf.lanes_below()
  %below = and i64 %mask, %lower
  %lanes = call i64 @llvm.ctpop.i64(i64 %mask)
  %many = trunc i64 %lanes to i32
  %speaks = icmp eq i64 %below, 0
; end
  br i1 %speaks, label %mix, label %silent
silent:
  ret i1 false
; else
  %many = add i32 0, 1
  br label %mix
; end
mix:
  %table = inttoptr i64 %base to $pointer
  %launch_1 = mul i64 %launch, -7046029254386353131
  %launch_2 = lshr i64 %launch_1, 32
  %launch_3 = xor i64 %launch_1, %launch_2
  %number = add i64 %launch_3, %block
  %mixed_1 = mul i64 %number, -4658895280553007687
  %mixed_2 = lshr i64 %mixed_1, 32
  %mixed_3 = xor i64 %mixed_1, %mixed_2
  %mixed = mul i64 %mixed_3, -7723592293110705685
  %mixed_high = and i64 %mixed, -65536
  %tag = or i64 %mixed_high, -9223372036854775808
; The homes of one launch's blocks lie side by side.
  %home = trunc i64 %number to i32
  br label %slot
slot:
  %turn = phi i32 [ 0, %mix ], [ %past, %next ]
  %place = add i32 %home, %turn
  %index = and i32 %place, $slot_mask
  %wide_index = zext i32 %index to i64
  %offset = shl i64 %wide_index, 4
  %from = add i64 %offset, 16
  %at = getelementptr i8, $pointer %table, i64 %from
  %past = add i32 %turn, 1
  %seen = load atomic i64, $pointer %at $scope monotonic, align 8
  %empty = icmp eq i64 %seen, 0
  br i1 %empty, label %claim, label %taken
claim:
  %claimed = cmpxchg $pointer %at, i64 0, i64 %tag $scope monotonic monotonic
  %won = extractvalue { i64, i1 } %claimed, 1
  %winner = extractvalue { i64, i1 } %claimed, 0
  br i1 %won, label %count, label %taken
taken:
  %there = phi i64 [ %seen, %slot ], [ %winner, %claim ]
  %there_tag = and i64 %there, -65536
  %there_own = icmp eq i64 %there_tag, %tag
  br i1 %there_own, label %count, label %pass
; Leaves a mark. The slot may have become this block's in the meantime.
pass:
  %passed = atomicrmw add $pointer %at, i64 1 $scope monotonic
  %passed_tag = and i64 %passed, -65536
  %passed_own = icmp eq i64 %passed_tag, %tag
  br i1 %passed_own, label %count, label %next
next:
  %on = icmp ult i32 %past, $probes
  br i1 %on, label %slot, label %full
full:
  %lost = atomicrmw add $pointer %table, i64 1 $scope monotonic
  br label %marks
; `own` is how many marks this thread takes away again. The marks of the thread that took the slot stay.
count:
  %own = phi i32 [ 0, %claim ], [ %turn, %taken ], [ %past, %pass ]
  %first = phi i1 [ true, %claim ], [ false, %taken ], [ false, %pass ]
  %count_at = getelementptr i8, $pointer %at, i64 8
; if last
  fence $scope acq_rel
; end
  %came = atomicrmw add $pointer %count_at, i32 %many $scope monotonic
  %now = add i32 %came, %many
  %complete = icmp eq i32 %now, %threads
  br i1 %complete, label %give_back, label %marks
give_back:
  %zero = atomicrmw sub $pointer %count_at, i32 %threads $scope monotonic
  fence $scope acq_rel
  %free = atomicrmw sub $pointer %at, i64 %tag $scope monotonic
  br label %marks
marks:
  %mine = phi i32 [ $probes, %full ], [ %own, %count ], [ %own, %give_back ]
  %theirs = phi i32 [ 0, %full ], [ 0, %count ], [ %turn, %give_back ]
; if last
  %elected = phi i1 [ false, %full ], [ false, %count ], [ true, %give_back ]
; else
  %elected = phi i1 [ false, %full ], [ %first, %count ], [ %first, %give_back ]
; end
  br label %sweep
sweep:
  %k = phi i32 [ 0, %marks ], [ %next_k, %swept ]
  %in_mine = icmp ult i32 %k, %mine
  %in_theirs = icmp ult i32 %k, %theirs
  %in_any = or i1 %in_mine, %in_theirs
  br i1 %in_any, label %swept, label %done
swept:
  %one = zext i1 %in_mine to i64
  %two = zext i1 %in_theirs to i64
  %marks_there = add i64 %one, %two
  %sweep_place = add i32 %home, %k
  %sweep_index = and i32 %sweep_place, $slot_mask
  %sweep_wide = zext i32 %sweep_index to i64
  %sweep_offset = shl i64 %sweep_wide, 4
  %sweep_from = add i64 %sweep_offset, 16
  %sweep_at = getelementptr i8, $pointer %table, i64 %sweep_from
  %taken_away = atomicrmw sub $pointer %sweep_at, i64 %marks_there $scope monotonic
  %next_k = add i32 %k, 1
  br label %sweep
done:
  ret i1 %elected
}
