"""Job scripts for Slurm, SGE and plain mpirun: `hvdtrain submit`."""
