"""What warpdiv finds: branches that split warps, what they cost, and how much of a warp works."""
