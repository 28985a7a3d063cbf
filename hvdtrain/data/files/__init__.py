"""The files behind datasets: copies near the process, sizes, changes while they are read."""
