"""What gpuhang finds: launches that do not end, and where their warps stand."""
