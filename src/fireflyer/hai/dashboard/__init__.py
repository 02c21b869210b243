"""The web dashboard: pages made by the server, one script, one style sheet. See
docs/operate/hai-dashboard.md.

auth_middleware.py       authentication by cookie, and the headers of every response
sessions.py   signed-in browsers, and one-time codes
app.py        the application: signing in and out, files, error pages
routes/       pages, streams and changes; forms and their limits; log of rejected forms
page_queries.py      queries of the pages, to the controller and the database
ledger_cache.py      the goodput ledger, kept current
charts/       geometry
tail.py       the end of a log
event_text.py       events of a task as text
text_filters.py      times, amounts and names as text
pages.py      templates
"""
