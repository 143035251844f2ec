; An operation on a hash table (ebpf/maps.py has the layout). Keys and values come in naturally aligned parts.
;
;   find      returns the value's address, or 0
;   delete    returns 0 or -ENOENT
;   update    (BPF_ANY), insert (BPF_NOEXIST), replace (BPF_EXIST) return 0, -EEXIST, -ENOENT, or -E2BIG if no slot is free, or
;             -EBUSY if another thread did not finish. The last two count as lost.
;
; Open addressing without locks: a compare-and-swap of a slot's state claims the slot. The state holds a hash of the key, so other
; threads know at once which key is coming.
;
; A thread that inserts zeros into a slot that was never used, as increment() does, waits for no other thread, and none waits for it:
; the value is zero already, so the slot is in use as soon as it is claimed (NAMELESS). Until the key is written, its hash stands for
; it. Two keys with the same 61 bits of hash could be taken for one in this moment.
;
; Other values have to be written first (WRITING). Until then the key is absent for find, delete and replace. A thread that inserts or
; updates the same key waits: it must not return before the key can be found. It gives up after `waits` looks, so that no launch can
; hang. The lanes of a warp that try together go on together, so that none waits for another one that cannot run.
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
  %tag = shl i64 $hash, $state_bits
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
; if claims
; for values
; if narrow
  %wide_value$n = zext i$bits %value$n to i64
; end
  %bits$n = or i64 $bits_before, $value_word
; end
  %is_zero = icmp eq i64 $value_bits, 0
  br label %look
look:
  %looks = phi i64 [ 0, %probe ], [ %more_looks, %again ]
; if warps
  %mask = call i32 @llvm.nvvm.activemask()
; end
; end
  %state = load atomic i64, $pointer %state_at $scope acquire, align 8
; What the slot is to this key. This needs fewer registers than comparing the state with the tag of each kind.
  %kind = xor i64 %state, %tag
; if claims
; Only the key's own tombstone can be used again: so no other slot can hold the same key.
  %is_empty = icmp eq i64 %state, 0
  %is_own = icmp eq i64 %kind, $DELETED
  %is_free = or i1 %is_empty, %is_own
  br i1 %is_free, label %claim, label %settled
claim:
  %is_ready = and i1 %is_empty, %is_zero
  %as = select i1 %is_ready, i64 $NAMELESS, i64 $WRITING
  %claimed = or i64 %tag, %as
  %swap = cmpxchg $pointer %state_at, i64 %state, i64 %claimed $scope acq_rel acquire
  %won = extractvalue { i64, i1 } %swap, 1
  br i1 %won, label %fill, label %settled
fill:
; for keys
  %kd$n = getelementptr i8, $pointer %key_at, i64 $offset
  store i$bits %k$n, $pointer %kd$n, align $width
; end
  br i1 %is_ready, label %publish, label %content
content:
; for values
  %vd$n = getelementptr i8, $pointer %value_at, i64 $offset
  store i$bits %value$n, $pointer %vd$n, align $width
; end
  br label %publish
; This sets the bit that is missing to FULL. It changes nothing if others have deleted a NAMELESS key since, or even write it again.
publish:
  %missing = xor i64 %as, $FULL
  fence $scope release
  %published = atomicrmw or $pointer %state_at, i64 %missing $scope monotonic
  %count = atomicrmw add $pointer %origin, i64 1 $scope monotonic
  br label %settled
settled:
  %done = phi i1 [ false, %look ], [ false, %claim ], [ true, %publish ]
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
  %is_full = icmp eq i64 %kind, $FULL
  br i1 %is_full, label %match, label %other
other:
; if claims
  br label %taken
; else
  %is_empty = icmp eq i64 %state, 0
  br i1 %is_empty, label %none, label %taken
; end
taken:
  %is_nameless = icmp eq i64 %kind, $NAMELESS
; if claims
  br i1 %is_nameless, label %found, label %hidden
hidden:
  %is_writing = icmp eq i64 %kind, $WRITING
  br i1 %is_writing, label %wait, label %next
wait:
  $pause
  br label %again
again:
  %more_looks = add i64 %looks, 1
  %patient = icmp ult i64 %more_looks, $waits
  br i1 %patient, label %look, label %gave_up
; else
  br i1 %is_nameless, label %found, label %next
; end
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
  br i1 %on, label %probe, label %lose
gave_up:
  br label %lose
lose:
  %error = phi i64 [ -7, %next ], [ -16, %gave_up ]
  %lost_at = getelementptr i8, $pointer %origin, i64 8
  %lost = atomicrmw add $pointer %lost_at, i64 1 $scope monotonic
  ret i64 %error
inserted:
  ret i64 0
; else
  br i1 %on, label %probe, label %none
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
  %full = or i64 %tag, $FULL
  %deleted = or i64 %tag, $DELETED
  br label %remove
; The key may be written between the two steps, once.
remove:
  %expected = phi i64 [ %state, %found ], [ %full, %written ]
  %swap = cmpxchg $pointer %state_at, i64 %expected, i64 %deleted $scope acq_rel acquire
  %won = extractvalue { i64, i1 } %swap, 1
  br i1 %won, label %gone, label %kept
kept:
  %was_nameless = icmp ne i64 %expected, %full
  br i1 %was_nameless, label %written, label %none
written:
  br label %remove
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
