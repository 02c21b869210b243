"""The web dashboard: pages made by the server, one script, one style sheet. See
docs/operate/hai-dashboard.md.

    app.py               the application: signing in and out, files, error pages
    auth_middleware.py   authentication by cookie, and the headers of every response
    sessions.py          signed-in browsers, and one-time codes
    routes/              pages, streams and changes; forms and their limits; log of rejected forms
    page_queries.py      queries of the pages to the controller and the database
    ledger_cache.py      cache of the goodput ledger
    charts/              geometry of inline SVG
    tail.py              the end of a log
    profiles.py          profiles of a task's attempts
    event_text.py        events of a task as text
    text_filters.py      times, amounts and names as text
    pages.py             templates
"""
