"""Services of a running process: log, progress bar, scores, timers, signals and the watchdog."""
