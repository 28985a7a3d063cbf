"""Job scripts for schedulers, Kubernetes and plain mpirun: `hvdtrain submit`."""
