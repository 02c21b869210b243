"""The web dashboard: pages made by the server, one script, one style sheet. docs/hai-dashboard.md tells more.

door.py       who is let in: cookies, and the headers of every answer
sessions.py   signed-in browsers, and one-time codes
forms.py      what a form may carry, and whose form it is
refusals.py   forms and sign-ins that were refused, written down
routes.py     signing in and out; page_routes.py the pages; acting_routes.py what changes something;
              live_routes.py streams
looks.py      what a page shows, read from the controller and the database
books.py      the goodput ledger, kept up to date
clustermap.py, timeline.py   geometry
tail.py       the end of a log
told.py       what an event of a task says
words.py      times, amounts and names as people read them
pages.py      templates
"""
