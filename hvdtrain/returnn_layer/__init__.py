"""The part of RETURNN's API that configs for plain PyTorch import from `returnn`, implemented on top of hvdtrain.

`imports.py` makes the modules visible to a config, `stand_ins.py` lists their names, and `adapter.py` wraps the config's
functions, with `older.py` for steps of an older form; the other files implement the names.
"""
