// Trades the code behind the `#` for a session. It leaves the address bar and the history before anything is sent.

const code = decodeURIComponent(location.hash.slice(1));
if (code) {
  history.replaceState(null, "", location.pathname);
  const form = document.forms.code;
  form.elements.code.value = code;
  form.requestSubmit();
}
