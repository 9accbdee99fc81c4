"""ClientApp: the reply to a request, from its checks, charges and training to the noise on what leaves a site."""
