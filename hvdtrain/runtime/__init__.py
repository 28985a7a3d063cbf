"""What a running process needs: log, progress bar, scores, timers, signals, the watchdog."""
