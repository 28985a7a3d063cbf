"""Forward, backward and update in one framework. The only part of hvdtrain that sees tensors."""
