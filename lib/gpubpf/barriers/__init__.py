"""What barrierlate finds: how long warps wait at barriers, and which warp they wait for."""
