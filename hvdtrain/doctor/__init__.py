"""Checks of what a training on several ranks and hosts needs: `python -m hvdtrain.doctor`."""
