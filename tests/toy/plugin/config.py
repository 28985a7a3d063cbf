"""Linear regression on the added kind of dataset, with the added framework and the model that it brings."""

backend = "arrays"
train = {"class": "LinearDataset", "num_seqs": 40, "slope": 2.0}
dev = {"class": "LinearDataset", "num_seqs": 10, "slope": 2.0}
batch_size = 40
num_epochs = 3
learning_rate = 0.005
linear_inputs = 3
