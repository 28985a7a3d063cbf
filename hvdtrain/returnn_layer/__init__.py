"""The part of RETURNN's API that configs for plain PyTorch import from `returnn`, implemented on top of hvdtrain.

`imports.py` makes the modules visible to a config and lists their names, and `adapter.py` wraps the config's functions; the other
files implement the names. Where RETURNN is installed, `installed_steps.py` takes the place of these.
"""
