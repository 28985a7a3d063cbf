"""Job scripts for Slurm, SGE and plain mpirun: `python -m hvdtrain.submit`."""
