"""Print the directory of the header for maps in your own HIP program: hipcc -I"$(python3 -m gpubpf.include)" …"""

from pathlib import Path

print(Path(__file__).with_name("hip"))
