#!/usr/bin/env bash
# Run pytest; if a few tests fail, and ONCE_MORE allows as many, run these once more, one after the other.
#
#   ONCE_MORE=5 tools/run_tests.sh COMMAND...      COMMAND is pytest with its arguments
#
# For CI, on machines that may be busy: a test that waits for processes can fail there for want of time. The tests that failed and
# then passed are named at the end. A fault that is always there fails again, and so does one that a random case has found, as both
# runs draw the same cases (HVDTRAIN_FUZZ_SEED). Without ONCE_MORE, this is just COMMAND.
set -uo pipefail
failed=.pytest_cache/v/cache/lastfailed
rm -f $failed
"$@"
status=$?
allowed=${ONCE_MORE:-0}
if [ $status != 1 ] || [ ! -e $failed ]; then exit $status; fi # 1: tests failed
names=$(sed -n 's/^  "\(.*\)": true,\{0,1\}$/\1/p' $failed)
count=$(echo "$names" | wc -l)
if [ "$count" -gt "$allowed" ]; then exit $status; fi
echo "run_tests.sh: $count of the tests failed; running them once more, alone"
"$@" -n 0 --last-failed --last-failed-no-failures none || exit
echo "run_tests.sh: failed among the other tests, passed alone:"
echo "$names"
