; An operation on a hash table (ebpf/maps.py has the layout). Keys and values come in naturally aligned parts.
;
;   find      returns the value's address, or 0
;   delete    returns 0 or -ENOENT
;   update    (BPF_ANY), insert (BPF_NOEXIST), replace (BPF_EXIST) return 0, -EEXIST, -ENOENT, or -E2BIG if no slot is free, which
;             counts as lost
;
; Open addressing without locks: a compare-and-swap of a slot's state claims the slot. The state holds a hash of the key, so other
; threads know at once which key is coming. A thread that looks for the same key waits, for a bounded time, until the key is
; written. The lanes of a warp that try together go on together, so that none waits for another one that cannot run.
; if warps
declare i32 @llvm.nvvm.activemask()
declare void @llvm.nvvm.bar.warp.sync(i32)
; end

define internal i64 @$name($parameters) alwaysinline nounwind convergent {
entry:
  %origin = inttoptr i64 %base to $pointer
; for keys
; if narrow
  %w$n = zext i$bits %k$n to i64
; end
  %x$n = xor i64 $mixed, $word
  %m$n = mul i64 %x$n, $factor
  %s$n = lshr i64 %m$n, 32
  %h$n = xor i64 %m$n, %s$n
; end
  %tag = shl i64 $hash, 2
  %busy = or i64 %tag, 1
  %full = or i64 %tag, 2
  %deleted = or i64 %tag, 3
  %start = lshr i64 $hash, 24
  br label %probe
probe:
  %turn = phi i64 [ 0, %entry ], [ %next_turn, %next ]
  %place = add i64 %start, %turn
  %slot = and i64 %place, $slot_mask
  %state_offset = shl i64 %slot, 3
  %state_from = add i64 %state_offset, $header_size
  %state_at = getelementptr i8, $pointer %origin, i64 %state_from
  %key_offset = mul i64 %slot, $key_stride
  %key_from = add i64 %key_offset, $keys_at
  %key_at = getelementptr i8, $pointer %origin, i64 %key_from
  %value_offset = mul i64 %slot, $value_stride
  %value_from = add i64 %value_offset, $values_at
  %value_at = getelementptr i8, $pointer %origin, i64 %value_from
  br label %look
look:
  %looks = phi i64 [ 0, %probe ], [ %more_looks, %again ]
; if claims
; if warps
  %mask = call i32 @llvm.nvvm.activemask()
; end
; end
  %state = load atomic i64, $pointer %state_at $scope acquire, align 8
; if claims
; Only the key's own tombstone can be used again: so no other slot can hold the same key.
  %is_empty = icmp eq i64 %state, 0
  %is_own = icmp eq i64 %state, %deleted
  %is_free = or i1 %is_empty, %is_own
  br i1 %is_free, label %claim, label %settled
claim:
  %swap = cmpxchg $pointer %state_at, i64 %state, i64 %busy $scope acq_rel acquire
  %won = extractvalue { i64, i1 } %swap, 1
  br i1 %won, label %fill, label %settled
fill:
; for keys
  %kd$n = getelementptr i8, $pointer %key_at, i64 $offset
  store i$bits %k$n, $pointer %kd$n, align $width
; end
; for values
  %vd$n = getelementptr i8, $pointer %value_at, i64 $offset
  store i$bits %value$n, $pointer %vd$n, align $width
; end
  store atomic i64 %full, $pointer %state_at $scope release, align 8
  %count = atomicrmw add $pointer %origin, i64 1 $scope monotonic
  br label %settled
settled:
  %done = phi i1 [ false, %look ], [ false, %claim ], [ true, %fill ]
; if warps
  call void @llvm.nvvm.bar.warp.sync(i32 %mask)
; end
; if join
  $join
; end
  br i1 %done, label %inserted, label %judge
judge:
  br i1 %is_free, label %again, label %rest
rest:
; end
  %is_full = icmp eq i64 %state, %full
  br i1 %is_full, label %match, label %other
other:
; if claims
  br label %taken
; else
  %is_empty = icmp eq i64 %state, 0
  br i1 %is_empty, label %none, label %taken
; end
taken:
  %is_busy = icmp eq i64 %state, %busy
  br i1 %is_busy, label %again, label %next
again:
  %more_looks = add i64 %looks, 1
  %patient = icmp ult i64 %more_looks, $waits
  br i1 %patient, label %look, label %gave_up
match:
; for keys
  %ka$n = getelementptr i8, $pointer %key_at, i64 $offset
  %kv$n = load i$bits, $pointer %ka$n, align $width
  %ke$n = icmp eq i$bits %kv$n, %k$n
  %kall$n = and i1 $equal_before, %ke$n
; end
  br i1 $equal, label %found, label %next
next:
  %next_turn = add i64 %turn, 1
  %on = icmp ult i64 %next_turn, $probes
; if claims
  br i1 %on, label %probe, label %gave_up
gave_up:
  %lost_at = getelementptr i8, $pointer %origin, i64 8
  %lost = atomicrmw add $pointer %lost_at, i64 1 $scope monotonic
  ret i64 -7
inserted:
  ret i64 0
; else
  br i1 %on, label %probe, label %none
gave_up:
  ret i64 $absent
none:
  ret i64 $absent
; end
found:
; if find
  %address = ptrtoint $pointer %value_at to i64
  ret i64 %address
; end
; if insert
  ret i64 -17
; end
; if delete
  %swap = cmpxchg $pointer %state_at, i64 %full, i64 %deleted $scope acq_rel acquire
  %won = extractvalue { i64, i1 } %swap, 1
  br i1 %won, label %gone, label %none
gone:
  %count = atomicrmw sub $pointer %origin, i64 1 $scope monotonic
  ret i64 0
; end
; if writes
; for values
  %vu$n = getelementptr i8, $pointer %value_at, i64 $offset
  store i$bits %value$n, $pointer %vu$n, align $width
; end
  ret i64 0
; end
}
