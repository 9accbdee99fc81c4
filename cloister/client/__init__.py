"""ClientApp: local training, local evaluation, and the checks on data that leaves a site."""
