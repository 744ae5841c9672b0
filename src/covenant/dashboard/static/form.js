// Form pages: a form is sent once, and the first field to fill is ready.

for (const form of document.forms) {
  form.addEventListener("submit", (event) => {
    if (form.dataset.sent) event.preventDefault();
    form.dataset.sent = "yes";
  });
}
addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});
document.querySelector('main :is(input:not([type="hidden"], [type="radio"], [type="checkbox"]), textarea, select)')?.focus();
