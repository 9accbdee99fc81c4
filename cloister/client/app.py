"""The ClientApp that Flower loads."""

from flwr.clientapp import ClientApp

from cloister.client.books import keep_books
from cloister.client.handlers import evaluate, train
from cloister.client.mods import contain_errors, only_what_is_agreed
from cloister.client.obey import obey_policy

app = ClientApp(mods=[contain_errors, obey_policy, only_what_is_agreed, keep_books])
app.train()(train)
app.evaluate()(evaluate)
