"""The ClientApp that Flower loads."""

from flwr.clientapp import ClientApp

from cloister.client.books import keep_books
from cloister.client.deadline import within_deadline
from cloister.client.handlers import evaluate, keep_personal, train
from cloister.client.mods import contain_errors, only_what_is_agreed
from cloister.client.obey import obey_policy
from cloister.client.sanitise import sanitise

app = ClientApp(mods=[contain_errors, within_deadline, obey_policy, only_what_is_agreed, keep_books, sanitise])
app.train()(train)
app.evaluate()(evaluate)
app.query()(keep_personal)
